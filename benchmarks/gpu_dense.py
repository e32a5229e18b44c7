"""Dense layers on a GPU against cuBLAS: time, share of the floor, and bits of every tile, in one run.

python benchmarks/gpu_dense.py sweep|table [--out FILE]: `sweep` times every tile that could be chosen,
`table` the ones that plugins/gpu/tiles.py chooses.
"""

import argparse
import importlib
import itertools
import multiprocessing
import statistics
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
L2_BYTES = 300 << 20  # weights that take turns, so that none comes from the cache
SHAPES = {  # outputs, inputs
    "9b qkvz": (12352, 4096),
    "9b out": (4096, 4096),
    "9b gate_up": (24576, 4096),
    "9b down": (4096, 12288),
    "nano3 in": (10304, 2688),
    "nano3 out": (2688, 4096),
    "0.8b down": (1024, 3584),
}
TOKENS = (1, 16, 32, 64, 128, 256, 1024, 8192)


def load_without_registering() -> None:
    """hemiola.plugins without its __init__, which registers CPU forms that this machine may not have."""
    folders = [p for p in (ROOT / "plugins").iterdir() if (p / "__init__.py").exists()]
    paths = {"hemiola": ROOT, "hemiola.plugins": ROOT / "plugins"}
    for name, path in (paths | {f"hemiola.plugins.{p.name}": p for p in folders}).items():
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules[name] = module


def candidates(num_tokens: int) -> list[tuple]:
    """(tile, segments) that could serve so many tokens."""
    tile = importlib.import_module("hemiola.plugins.gpu.tiles").Tile
    made: list[tuple] = []

    def add(outputs, tokens, inner, warps, stages, first=True, persistent=False, segments=(1,)):
        made.extend((tile(outputs, tokens, inner, warps, stages, first, persistent), s) for s in segments)

    if num_tokens <= 16:
        for outputs, inner, warps, stages in ((16, 256, 4, 4), (16, 256, 2, 4), (16, 128, 1, 5), (32, 128, 4, 5),
                                              (32, 256, 4, 4), (64, 128, 4, 4), (64, 64, 4, 6)):  # fmt: skip
            add(outputs, 16, inner, warps, stages, segments=(1, 2, 4))
        add(64, 16, 128, 4, 6, persistent=True)
        add(64, 16, 256, 4, 4, persistent=True)
    elif num_tokens <= 64:
        tokens = 32 if num_tokens <= 32 else 64
        for outputs, inner, warps, stages in ((32, 128, 4, 5), (32, 256, 4, 3), (64, 128, 4, 4), (64, 64, 4, 6),
                                              (128, 64, 4, 4), (128, 128, 8, 3)):  # fmt: skip
            add(outputs, tokens, inner, warps, stages, segments=(1, 2, 4))
        add(64, tokens, 128, 4, 5, persistent=True)
        add(128, tokens, 64, 4, 6, persistent=True)
        add(64, 32, 128, 4, 5, segments=(1, 2))
    elif num_tokens <= 256:
        for outputs, tokens, warps, stages in ((64, 64, 4, 5), (128, 64, 4, 4), (128, 128, 8, 3), (64, 128, 4, 4)):
            add(outputs, tokens, 64, warps, stages, segments=(1, 2, 4))
        for outputs, tokens, inner, warps, stages, first in (
            (64, 64, 128, 4, 5, True), (128, 64, 64, 4, 6, True), (128, 128, 64, 8, 5, True),
            (128, 128, 64, 4, 5, False), (64, 128, 64, 4, 6, False), (128, 256, 64, 8, 4, True),
        ):  # fmt: skip
            add(outputs, tokens, inner, warps, stages, first, True, segments=(1,))
    else:
        for outputs, tokens, inner, warps, stages, first in (
            (128, 128, 64, 8, 4, False), (128, 128, 64, 4, 4, False), (256, 128, 64, 8, 3, False),
            (256, 128, 64, 8, 4, False), (128, 256, 64, 8, 3, False), (128, 256, 64, 8, 4, False),
            (128, 256, 64, 8, 4, True), (128, 128, 128, 8, 3, False),
        ):  # fmt: skip
            add(outputs, tokens, inner, warps, stages, first, True, (1, 2) if outputs == tokens else (1,))
    return made


def compile_one(job: tuple) -> None:
    """Fills the disk cache with one tile's kernel, in a process of its own."""
    load_without_registering()
    fused = importlib.import_module("hemiola.plugins.linear.triton").fused
    tile, segments = job
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    try:
        fused(x, torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16), tile=tile, segments=segments)
    except Exception as error:
        print("cannot be compiled", job, str(error)[:200], flush=True)


def seconds(calls: list[Callable[[], object]]) -> float:
    """Of one call, the median of replays of a graph that holds them all."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:]) / len(calls) / 1e3


def copy_bandwidth() -> float:
    """Bytes per second, read and written."""
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * a.numel() / seconds([lambda: b.copy_(a)] * 4)


def measure(name: str, bandwidth: float, is_sweep: bool, log: Callable[[str], None]) -> None:
    """One layer, from 1 to 8192 tokens."""
    fused = importlib.import_module("hemiola.plugins.linear.triton").fused
    tiles = importlib.import_module("hemiola.plugins.gpu.tiles")
    num_outputs, num_inputs = SHAPES[name]
    weight = torch.randn(num_outputs, num_inputs, device="cuda", dtype=torch.bfloat16) * num_inputs**-0.5
    rows = torch.randn(max(TOKENS), num_inputs, device="cuda", dtype=torch.bfloat16)
    copies = [weight] + [weight.clone() for _ in range(max(1, min(15, L2_BYTES // weight.nbytes)))]
    truth: dict[int, torch.Tensor] = {}
    for num_tokens in TOKENS:
        x, few = rows[:num_tokens], num_tokens <= 256
        turns = copies * (1 if len(copies) > 3 else 4) if few else [weight] * 3
        library = seconds([lambda w=w: torch.mm(x, w.t()) for w in turns])
        moved = 2 * (weight.numel() + num_tokens * (num_inputs + num_outputs)) / bandwidth
        floor = max(moved, 2 * num_tokens * weight.numel() / 790e12)
        found = []
        options = candidates(num_tokens) if is_sweep else [(None, 0)]
        for tile, segments in options:
            if is_sweep and segments > 1 and num_inputs // 256 < segments:
                continue
            try:
                y = fused(x, weight, tile=tile, segments=segments)
                took = seconds([lambda w=w: fused(x, w, tile=tile, segments=segments) for w in turns])
            except Exception as error:
                log(f"    {tile} {segments}: {type(error).__name__} {str(error)[:100]}")
                continue
            ours = truth.setdefault(segments, y[:1].clone())
            same = torch.equal(y[:1], ours)
            if num_tokens > 1:
                mid = num_tokens // 2
                lone = fused(rows[mid : mid + 1], weight, tile=tiles.tile_of(1, num_outputs), segments=segments)
                same = same and torch.equal(y[mid : mid + 1], lone)
            found.append((took, segments, tile, same))
        library_y = torch.mm(x, weight.t()).float()
        exact = x[:64].double() @ weight.double().t()
        error = ((y[:64].double() - exact).norm() / exact.norm()).item()
        off = ((library_y[:64].double() - exact).norm() / exact.norm()).item()
        log(f"{name} {num_outputs}x{num_inputs} T {num_tokens}: cuBLAS {library * 1e6:.1f} us, floor {floor * 1e6:.1f} us"
            f" ({floor / library:.0%}), error {error:.1e} (cuBLAS {off:.1e})")  # fmt: skip
        for segments, group in itertools.groupby(sorted(found, key=lambda f: (f[1], f[0])), key=lambda f: f[1]):
            lines = list(group)
            for took, _, tile, same in lines[: 4 if is_sweep else 1]:
                log(f"    segments {segments} {took * 1e6:8.1f} us  x{took / library:.3f}  floor {floor / took:.0%}"
                    f"  bits {'same' if same else 'DIFFER'}  {tuple(tile) if tile else ''}")  # fmt: skip
            bad = [tuple(tile) for _, _, tile, same in lines if not same]
            if bad:
                log(f"    DIFFER: {bad}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["sweep", "table"])
    parser.add_argument("--out", default="")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    args = parser.parse_args()
    load_without_registering()
    out = open(args.out, "a") if args.out else None  # noqa: SIM115

    def log(line: str) -> None:
        print(line, flush=True)
        if out:
            print(line, file=out, flush=True)

    if args.mode == "sweep":
        jobs = list(dict.fromkeys(job for t in TOKENS for job in candidates(t)))
        with multiprocessing.get_context("spawn").Pool(14) as pool:
            pool.map(compile_one, jobs, chunksize=2)
    bandwidth = copy_bandwidth()
    log(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    for name in args.shapes.split(","):
        measure(name, bandwidth, args.mode == "sweep", log)


if __name__ == "__main__":
    main()
