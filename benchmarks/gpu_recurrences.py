"""Recurrent steps on a GPU: time against the bytes that must move.

PYTHONPATH=.:tests python3 benchmarks/gpu_recurrences.py [--ops mamba2 delta] [--bench] [--prefill 8192]

The column bits is a hash of the first call's outputs, to compare two forms of a kernel.
"""

import argparse
import hashlib
import importlib.util
import json
import random
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import triton.testing

from hemiola.plugins.gpu.compile import on_demand

ROOT = Path(__file__).resolve().parent.parent


def tests_of(op: str) -> types.ModuleType:
    folder = ROOT / "tests" / "plugins" / op
    path = next(path for name in ("on_gpu.py", "test_triton.py") if (path := folder / name).is_file())
    spec = importlib.util.spec_from_file_location(f"test_{op}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def steady_rows(num: int, chunk_len: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Decode rows as they stand after many steps: one certain token and the drafts, some of them accepted."""
    rng, rows = random.Random(seed), []
    for n in range(num):
        committed = edge = rng.randint(20, 60) * chunk_len + rng.randrange(chunk_len)
        for _ in range(30):
            edge = (committed + 1) // chunk_len * chunk_len
            committed += 1 + (rng.choice((0, 1, 2, 3, 3)) if tokens > 1 else 0)
        rows.append((n * tokens, tokens, tokens - 1, n + 1, committed, edge, 0, 0))
    return torch.tensor(rows, dtype=torch.int32)


def moved(rows: torch.Tensor, chunk_len: int) -> tuple[float, float]:
    """States and records that a row moves on average: what it reads, stores at edges and appends."""
    _, num, drafts, _, committed, edge = rows[:, :6].double().unbind(1)
    new_edge = (committed + num - drafts).div(chunk_len).floor() * chunk_len
    states = 1 + (new_edge > edge).double().mean().item()
    return states, (committed - edge + num).mean().item() + num.mean().item()


def timed(call: Callable[[int], object], num_sets: int) -> float:
    """Microseconds of call(i), replayed in one graph over all sets of buffers; the median of nine."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for i in range(num_sets):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, 16 // num_sets)
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for i in range(num_sets):
                call(i)
    graph.replay()
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats / num_sets)
    return sorted(times)[4]


def copy_bandwidth() -> float:
    """TB/s of a large copy, bytes read and written."""
    a = torch.empty(2**29, device="cuda")
    b = torch.empty_like(a)
    us = triton.testing.do_bench(lambda: b.copy_(a), warmup=50, rep=100, return_mode="median") * 1e3
    return 2 * a.numel() * 4 / us / 1e6


class Layer:
    """One op at the sizes of a model: buffers enough to leave the cache cold."""

    def __init__(self, op: str, sizes: dict, num_rows: int, tokens: int, plan: object) -> None:
        torch.manual_seed(0)
        self.it = replace(tests_of(op).subject(**sizes), plan=plan)
        self.rows = steady_rows(num_rows, self.it.chunk_len, tokens)
        slots = self.it.make_slots(num_rows + 1)
        self.state_bytes = slots[0].numel() * slots[0].element_size() // (num_rows + 1)
        self.record_bytes = sum(t[0, 0].numel() * t.element_size() for t in slots[1:])
        self.num_sets = max(1, min(24, int(3e8 / (self.state_bytes * num_rows))))
        self.sets = [[torch.zeros_like(t).normal_() if t.dtype != torch.int32 else t for t in slots]]
        self.sets += [[t.clone() for t in self.sets[0]] for _ in range(self.num_sets - 1)]
        self.tokens = self.it.make_tokens(num_rows * tokens)
        self.device_rows = self.rows.to(slots[0].device)

    def run(self, i: int) -> torch.Tensor:
        return self.it.call(self.tokens, self.sets[i], self.device_rows)

    def report(self, label: str, copy: float) -> None:
        bits = hashlib.sha256(self.run(0).cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]
        us = timed(self.run, self.num_sets)
        states, records = moved(self.rows, self.it.chunk_len)
        per_row = states + records * self.record_bytes / self.state_bytes
        rate = per_row * self.state_bytes * len(self.rows) / us / 1e6
        print(f"| {label} | {us:.1f} | {per_row:.2f} | {rate:.2f} | {rate / copy:.0%} | {bits} |", flush=True)


MODELS = {
    "mamba2": {
        "128x64x128": {"heads": 128, "width": 64, "groups": 8, "depth": 128},
        "128x80x128": {"heads": 128, "width": 80, "groups": 8, "depth": 128},  # Nemotron-Nano-9B-v2
        "64x64x128": {"heads": 64, "width": 64, "groups": 8, "depth": 128},  # Nemotron-3-Nano-30B-A3B
    },
    "delta": {"32x128x128": {"heads": 32, "width": 128, "groups": 16, "depth": 128}},
}


def bench(op: str, plans: list, chunks: list[int], batches: list[int], copy: float) -> None:
    for model, sizes in MODELS[op].items():
        for chunk_len in chunks:
            for num_rows in batches:
                for plan in plans:
                    label = f"{op} {model} {plan or ''} | {chunk_len} | {num_rows}"
                    try:
                        for tokens in (1, 4):
                            layer = Layer(op, sizes | {"chunk_len": chunk_len}, num_rows, tokens, plan)
                            layer.report(f"{label} | {tokens}", copy)
                            del layer
                    except Exception as problem:
                        print(f"| {label} | {type(problem).__name__} {str(problem)[:120]} |", flush=True)


def prefill(op: str, chunks: list[int], tokens: int) -> None:
    for model, sizes in MODELS[op].items():
        for chunk_len in chunks:
            it = tests_of(op).subject(**sizes, chunk_len=chunk_len)
            slots, new = it.make_slots(2), it.make_tokens(tokens)
            rows = torch.tensor([[0, tokens, 0, 1, 0, 0, 0, 0]], dtype=torch.int32, device="cuda")
            us = timed(lambda _, it=it, new=new, slots=slots, rows=rows: it.call(new, slots, rows), 1)
            print(f"| {op} {model}, a prompt | {chunk_len} | 1 | {tokens} | {us:.0f} | | | | |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ops", nargs="+", default=["mamba2", "delta"])
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--plans", default="[null]")
    parser.add_argument("--chunks", nargs="+", type=int, default=[16, 32])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_recurrences.py: torch finds no CUDA device here")
    on_demand()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    copy = copy_bandwidth()
    print(f"| layer | chunk | rows | tokens | us | states a row | TB/s | of {copy:.2f} TB/s | bits |")
    print("|---|---|---|---|---|---|---|---|---|")
    for op in options.ops:
        if options.bench and op in MODELS:
            bench(
                op,
                [plan and tuple(plan) for plan in json.loads(options.plans)],
                options.chunks,
                options.batches,
                copy,
            )
        if options.prefill and op in MODELS:
            prefill(op, options.chunks, options.prefill)


if __name__ == "__main__":
    main()
