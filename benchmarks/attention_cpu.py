"""CPU time of paged attention on one thread, and whether a token's bits are those of the token alone.

PYTHONPATH=.:tests python benchmarks/attention_cpu.py [--seconds 1] [--shapes 8/2x64 16/1x128] [--pages fp8]

Microseconds, best of all calls within the seconds. G/s: products of queries with keys, and of shares with
values, number by number. `bits`: the last token of every request against a step that brings this token alone.
"""

import argparse
import time

import torch
from kit.ops import int32, row, same_bits
from ops_cpu import bound

from hemiola.plugins import OPS

PAGE_LEN = 64
PAGES = {"fp32": torch.float32, "fp8": torch.float8_e4m3fn}
SHAPES = ["8/2x64", "8/2x128", "8/2x256", "8/8x64", "6/2x80", "16/1x128"]  # heads / key heads x numbers
STEPS = {  # tokens before the step, and new ones, of each row
    "decode, 1 row, kv 600": [(599, 1)],
    "decode, 8 rows, kv 600": [(599, 1)] * 8,
    "decode, 1 row, kv 8000": [(7999, 1)],
    "verify 3 drafts, kv 600": [(596, 4)],
    "prompt of 64": [(0, 64)],
    "prompt of 512": [(0, 512)],
    "prompt of 2048": [(0, 2048)],
    "4 prompts of 512": [(0, 512)] * 4,
    "512 tokens at 1536": [(1536, 512)],
}


def arguments(
    heads: int, groups: int, depth: int, step: list[tuple[int, int]], kept: torch.dtype = torch.float32
) -> list:
    """Random ones; pages lie in any order."""
    torch.manual_seed(0)
    width = -(-max(before + new for before, new in step) // PAGE_LEN)
    pages = [torch.randn(1 + len(step) * width, PAGE_LEN, groups, depth).to(kept) for _ in range(2)]
    table = 1 + torch.randperm(len(step) * width).view(len(step), -1).int()
    counts = [new for _, new in step]
    q, k, v = (torch.randn(sum(counts), count, depth) for count in (heads, groups, groups))
    starts = [sum(counts[:n]) for n in range(len(step))]
    rows = [row(first=first, num_tokens=new) for first, new in zip(starts, counts, strict=True)]
    positions = torch.cat([torch.arange(before, before + new) for before, new in step]).int()
    return [q, k, v, *pages, table, int32(*rows).view(-1, 8), positions, depth**-0.5, 0, 1.0, 1.0]


def alone(values: list, y: torch.Tensor) -> bool:
    """Whether each row's last token has the same bits in a step of its own."""
    same = True
    for n, (first, count, *_) in enumerate(values[6].tolist()):
        last = slice(first + count - 1, first + count)
        line = int32(*row(num_tokens=1)).view(1, 8)
        own = (
            [part[last] for part in values[:3]] + values[3:5] + [values[5][n : n + 1], line, values[7][last]]
        )
        same &= same_bits(bound(OPS["attention"], *own, *values[8:])(), y[last])
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--pages", choices=PAGES, default="fp32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| heads | step | us | G/s | bits |\n|---|---|---|---|---|")
    with torch.inference_mode():
        for shape in options.shapes:
            heads, groups, depth = map(int, shape.replace("x", "/").split("/"))
            for name, step in STEPS.items():
                values = arguments(heads, groups, depth, step, PAGES[options.pages])
                call = bound(OPS["attention"], *values)
                bits = "equal" if alone(values, call()) else "DIFFERENT"
                best, end = float("inf"), time.perf_counter() + options.seconds
                while time.perf_counter() < end:
                    start = time.process_time()
                    call()
                    best = min(best, time.process_time() - start)
                products = 2 * heads * depth * sum(n * before + n * (n + 1) // 2 for before, n in step)
                speed = f"{best * 1e6:.0f} | {products / best / 1e9:.1f}"
                print(f"| {shape} | {name} | {speed} | {bits} |", flush=True)


if __name__ == "__main__":
    main()
