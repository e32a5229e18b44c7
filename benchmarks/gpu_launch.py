"""What a launch costs the host: ours from an engine's binaries against Triton's own, same bits.

    PYTHONPATH=.:tests python benchmarks/gpu_launch.py

Per op of small layers: microseconds of the op's function, and of its kernels' launches in it.
"""

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from kit.triton_launcher import launched_by_triton

from hemiola.plugins.gpu.compile import on_demand
from hemiola.plugins.gpu.launch import Kernel, launches
from hemiola.plugins.linear.cuda import linear
from hemiola.plugins.mamba2.cuda import mamba2
from hemiola.plugins.norm.cuda import norm

ROUNDS = 300


def calls() -> dict[str, Callable[[], torch.Tensor]]:
    """One row of one token."""

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    wide, absent = torch.float32, torch.empty(0, device="cuda", dtype=torch.bfloat16)
    rows = torch.tensor([[0, 1, 0, 1, 5, 0, 0, 0]], dtype=torch.int32, device="cuda")
    H, P, G, D = 32, 64, 1, 128
    state = (made(2, H, P, D, dtype=wide), made(2, 40, H, P), made(2, 40, G, D), made(2, 40, H, dtype=wide))
    inputs = (made(1, H, P), made(1, G, D), made(1, G, D), made(1, H))
    factors = (made(H, dtype=wide), -made(H, dtype=wide).abs(), made(H, dtype=wide))
    return {
        "norm": partial(norm, made(1, 1024), absent, made(1024, dtype=wide), 1e-6, 1024, False),
        "linear by pointers": partial(linear, made(1, 1024), made(8192, 1024), absent),
        "linear by descriptors": partial(linear, made(1, 1024), made(2048, 1024), absent),
        "mamba2": partial(mamba2, *inputs, *factors, *state, rows, 32, 0.0, 1.0),
    }


def host(run: Callable[[], object]) -> float:
    """Microseconds until the call returns; best of a few rounds with a free queue."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(ROUNDS):
            run()
        best = min(best, time.perf_counter() - start)
        torch.cuda.synchronize()
    return best / ROUNDS * 1e6


def launched(run: Callable[[], object]) -> int:
    """How many kernels a call launches."""
    seen: list[Kernel] = []
    with launches(lambda kernel, *rest: seen.append(kernel)):
        run()
    return len(seen)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("gpu_launch.py: torch finds no CUDA device here")
    on_demand()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    print("Microseconds of host time.\n")
    print("| op | launches | op, ours | op, Triton's | op without launches | a launch, ours | Triton's |")
    print("|---|---|---|---|---|---|---|")
    for name, run in calls().items():
        num = launched(run)
        with launches(lambda *rest: None):
            bare = host(run)
        mine, ours = run(), host(run)
        with launched_by_triton():
            other, theirs = run(), host(run)
        same = "" if torch.equal(mine, other) else " OTHER BITS"
        print(f"| {name}{same} | {num} | {ours:.1f} | {theirs:.1f} | {bare:.1f} | {(ours - bare) / num:.1f}"
              f" | {(theirs - bare) / num:.1f} |")  # fmt: skip


if __name__ == "__main__":
    main()
