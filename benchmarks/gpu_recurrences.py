"""Recurrent steps on a GPU: bits against the plain runs, then time against the bytes that must move.

PYTHONPATH=.:tests python3 benchmarks/gpu_recurrences.py --ops mamba2 delta conv [--check] [--bench] [--plans]
"""

import argparse
import importlib.util
import json
import random
import re
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path

import torch
import triton.testing

ROOT = Path(__file__).resolve().parent.parent
CHECK_LENGTHS = (150, 97, 64, 33, 7)


def import_kernels_only() -> None:
    """Make hemiola.plugins importable without its CPU forms, which this machine may not be able to load."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    package = types.ModuleType("hemiola.plugins")
    package.__path__ = [str(ROOT / "plugins")]
    import hemiola  # noqa: F401

    sys.modules["hemiola.plugins"] = package
    from hemiola.plugins.gpu.compile import on_demand

    on_demand()


def tests_of(op: str) -> types.ModuleType:
    path = ROOT / "tests" / "plugins" / op / "test_triton.py"
    spec = importlib.util.spec_from_file_location(f"test_{op}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def check(op: str, only: str) -> None:
    """The op's tests whose name and case match, without pytest's fixtures."""
    tests = tests_of(op)
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    passed, failed = 0, []
    for name, test in vars(tests).items():
        if not name.startswith("test_"):
            continue
        for case, arguments in cases(test):
            if not re.search(only, f"{name}[{case}]"):
                continue
            try:
                test(**arguments)
                passed += 1
            except Exception as problem:  # a report of all of them is worth more than the first
                failed.append(f"{name}[{case}]: {type(problem).__name__} {str(problem)[:300]}")
                if not isinstance(problem, AssertionError):
                    traceback.print_exc(limit=-3)
    torch.use_deterministic_algorithms(False)
    print(f"{op}: {passed} tests passed, {len(failed)} failed", *failed, sep="\n  ", flush=True)


def cases(test: Callable[..., None]) -> list[tuple[str, dict]]:
    """What pytest would call the test with."""
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    rest = {name: None for name in names if name in ("poisoned_empty", "monkeypatch")}
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            ids = mark.kwargs.get("ids", str)
            ids = [ids(value) for value in mark.args[1]] if callable(ids) else ids
            return [(str(i), {mark.args[0]: v} | rest) for i, v in zip(ids, mark.args[1], strict=True)]
    return [("", rest)]


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
        self.it = tests_of(op).subject(**sizes, plan=plan)
        self.rows = steady_rows(num_rows, self.it.chunk_len, tokens)
        slots = self.it.make_slots(num_rows + 1)
        self.state_bytes = slots[0].numel() * slots[0].element_size() // (num_rows + 1)
        self.record_bytes = sum(t[0, 0].numel() * t.element_size() for t in slots[1:])
        self.num_sets = max(1, min(24, int(3e8 / (self.state_bytes * num_rows))))
        self.sets = [[torch.zeros_like(t).normal_() if t.dtype != torch.int32 else t for t in slots]]
        self.sets += [[t.clone() for t in self.sets[0]] for _ in range(self.num_sets - 1)]
        self.tokens = self.it.make_tokens(num_rows * tokens)
        self.device_rows = self.rows.cuda()

    def run(self, i: int) -> torch.Tensor:
        return self.it.call(self.tokens, self.sets[i], self.device_rows)

    def report(self, label: str, copy: float) -> float:
        us = timed(self.run, self.num_sets)
        states, records = moved(self.rows, self.it.chunk_len)
        per_row = states + records * self.record_bytes / self.state_bytes
        rate = per_row * self.state_bytes * len(self.rows) / us / 1e6
        print(
            f"{label}: {us:8.1f} us  {per_row:.2f} states/row  {rate:.2f} TB/s = {rate / copy:.0%} of copy",
            flush=True,
        )
        return us


MODELS = {
    "mamba2": {"128x64x128": {"heads": 128, "width": 64, "groups": 8, "depth": 128}},
    "delta": {"32x128x128": {"heads": 32, "width": 128, "groups": 16, "depth": 128}},
}


def bench(op: str, plans: list, chunks: list[int], batches: list[int], copy: float) -> None:
    for model, sizes in MODELS[op].items():
        for chunk_len in chunks:
            for num_rows in batches:
                for plan in plans:
                    label = f"{op} {model} C{chunk_len} rows {num_rows:3d} {plan or ''}"
                    try:
                        times = []
                        for tokens in (1, 4):
                            layer = Layer(op, sizes | {"chunk_len": chunk_len}, num_rows, tokens, plan)
                            times.append(layer.report(f"{label} T{tokens}", copy))
                            del layer
                        print(f"{label}: T4 / T1 = {times[1] / times[0]:.2f}", flush=True)
                    except Exception as problem:
                        print(f"{label}: {type(problem).__name__} {str(problem)[:120]}", flush=True)


def prefill(op: str, chunks: list[int], tokens: int) -> None:
    for model, sizes in MODELS[op].items():
        for chunk_len in chunks:
            it = tests_of(op).subject(**sizes, chunk_len=chunk_len)
            slots, new = it.make_slots(2), it.make_tokens(tokens)
            rows = torch.tensor([[0, tokens, 0, 1, 0, 0, 0, 0]], dtype=torch.int32, device="cuda")
            us = timed(lambda _, it=it, new=new, slots=slots, rows=rows: it.call(new, slots, rows), 1)
            print(
                f"{op} {model} C{chunk_len} prompt {tokens}: {us:.0f} us, {us / tokens * chunk_len:.2f} each",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ops", nargs="+", default=["mamba2", "delta"])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default="", help="a pattern of tests")
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--plans", default="[null]")
    parser.add_argument("--chunks", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256])
    options = parser.parse_args()
    import_kernels_only()
    print(torch.cuda.get_device_name(), torch.__version__)
    for op in options.ops:
        if options.check:
            check(op, options.only)
    if not options.bench and not options.prefill:
        return
    copy = copy_bandwidth()
    print(f"copy {copy:.2f} TB/s")
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
