"""Time of a call of the ops that hold states on a CPU, and whether its bits are those of the plain run.

PYTHONPATH=.:tests python benchmarks/ops_cpu.py [--threads 2] [--repeats 200]

Microseconds, lower quartile of the repeats. The plain run is one request in one call. `bytes` are what a step
must read and write at least: states or keys and values, once; GB/s is what that makes. Dense layers and
experts have a table of their own (linear_cpu.py).
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from kit.ops import Subject, int32, row, same_bits, subject

from hemiola.plugins import OPS
from hemiola.plugins.spec import Op

CHUNK_LEN, NUM_DRAFTS = 16, 3
RECURRENT = {
    "conv 768": subject("conv", E=768, W=4),
    "mamba2 8x64x64": subject("mamba2", 0.0, 1e9, H=8, P=64, G=2, D=64),
    "gdn 8x64x64": subject("delta", G=4, K=64, H=8, V=64, J=1),
    "gdn 16x128x128": subject("delta", G=16, K=128, H=16, V=128, J=1),
    "kda 8x32x32": subject("delta", G=8, K=32, H=8, V=32, J=32),
}
STEPS = {  # tokens before the step, and new ones, of each row
    "decode, 1 row": [(37, 1)],
    "decode, 8 rows": [(committed, 1) for committed in range(32, 48, 2)],
    "verify 3 drafts, 8 rows": [(committed, 4) for committed in range(32, 40)],
    "prompt of 512": [(0, 512)],
    "prompt of 512 + 7 decode": [(0, 512), *((committed, 1) for committed in range(32, 46, 2))],
}
ATTENTION = {
    "decode, 1 row, kv 600": [(599, 1)],
    "decode, 8 rows, kv 600": [(599, 1)] * 8,
    "verify 3 drafts, 8 rows, kv 600": [(596, 4)] * 8,
    "decode, 1 row, kv 8000": [(7999, 1)],
    "prompt of 512": [(0, 512)],
    "512 tokens at 1536": [(1536, 512)],
}


def quartile(call: Callable[[], object], repeats: int) -> float:
    """Microseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 4] * 1e6


def bound(op: Op, *values: object) -> Callable[[], torch.Tensor]:
    """A call as an engine makes it: the form is chosen, and its weights are packed."""
    call = op.call(*values)
    chosen = op.choose(call, "cpu").form
    run = op.bind(chosen.name, [call.sizes[letter] for letter in chosen.sizes])
    packs = [chosen.packs.get(arg.name) for arg in op.args]
    packed = [pack(value) if pack else value for pack, value in zip(packs, values, strict=False)]
    return lambda: run(*packed, *values[len(packs) :])


def recurrent(case: Subject, step: list[tuple[int, int]], repeats: int) -> tuple[float, float, bool]:
    """Microseconds, bytes, and whether the bits are those of each request alone and in one call."""
    states = case.states(len(step) + 1, CHUNK_LEN, NUM_DRAFTS)
    texts = [case.tokens(before + new, seed) for seed, (before, new) in enumerate(step)]
    rows, first = [], 0
    for slot, (text, (before, new)) in enumerate(zip(texts, step, strict=True), start=1):
        if before:
            past = [part[:before] for part in text]
            case.run("compiled", past, states, [row(num_tokens=before, slot=slot)], CHUNK_LEN)
        drafts = new - 1 if new == NUM_DRAFTS + 1 else 0
        edge = before // CHUNK_LEN * CHUNK_LEN
        rows.append((first, new, drafts, slot, before, edge, 0, 0))
        first += new
    tokens = [
        torch.cat([text[n][before:] for text, (before, _) in zip(texts, step, strict=True)])
        for n in range(len(texts[0]))
    ]
    y = case.run("compiled", tokens, states, rows, CHUNK_LEN)
    alone = [
        case.run("compiled", text, case.states(2, CHUNK_LEN, 0), [row(num_tokens=sum(lens))], CHUNK_LEN)
        for text, lens in zip(texts, step, strict=True)
    ]
    exact = same_bits(y, torch.cat([one[before:] for one, (before, _) in zip(alone, step, strict=True)]))
    size = sum(states[0][slot].numel() * 4 for slot in range(1, len(step) + 1))
    call = bound(case.op, *tokens, *case.constants(), *states, int32(*rows), CHUNK_LEN, *case.attrs)
    return quartile(call, repeats), size, exact


def attention(step: list[tuple[int, int]], repeats: int) -> tuple[float, float, bool]:
    """8 query heads and 2 key heads of 64; compared with SDPA within fp32's rounding."""
    heads, groups, depth, page_len = 8, 2, 64, 64
    per_row = -(-max(before + new for before, new in step) // page_len)
    pages = [torch.randn(1 + len(step) * per_row, page_len, groups, depth) for _ in range(2)]
    table = 1 + torch.randperm(len(step) * per_row).view(len(step), -1).int()
    new = sum(count for _, count in step)
    q, k, v = (torch.randn(new, count, depth) for count in (heads, groups, groups))
    positions = torch.cat([torch.arange(before, before + count) for before, count in step]).int()
    rows, first = [], 0
    for slot, (before, count) in enumerate(step, start=1):
        rows.append(row(first=first, num_tokens=count, slot=slot, committed=before))
        first += count
    arguments = (q, k, v, *pages, table, int32(*rows), positions, depth**-0.5, 0, 1.0, 1.0)
    run = bound(OPS["attention"], *arguments)
    y, same = run(), True
    for n, (before, count) in enumerate(step):
        keys, values = (
            part[table[n].long()].flatten(0, 1)[: before + count].transpose(0, 1) for part in pages
        )
        own = slice(rows[n][0], rows[n][0] + count)
        seen = torch.arange(before + count) <= torch.arange(before, before + count)[:, None]
        theirs = F.scaled_dot_product_attention(
            q[own].transpose(0, 1), keys, values, seen, scale=depth**-0.5, enable_gqa=True
        )
        same &= torch.allclose(y[own], theirs.transpose(0, 1), rtol=1e-4, atol=1e-5)
    size = 8 * groups * depth * sum(before + count for before, count in step)
    return quartile(run, repeats), size, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, C = {CHUNK_LEN}, torch {torch.__version__}")
    print(f"| {'op':14} | {'step':32} | us       | GB/s   | right |\n|---|---|---|---|---|")
    with torch.inference_mode():
        cases = [(name, step, recurrent, case) for name, case in RECURRENT.items() for step in STEPS]
        for name, step, measure, case in cases:
            repeats = options.repeats if STEPS[step][0][1] < 100 else 5 + options.repeats // 10
            show(name, step, *measure(case, STEPS[step], repeats))
        for step, rows in ATTENTION.items():
            repeats = options.repeats if rows[0][1] < 100 else 5 + options.repeats // 10
            show("attention 8/2", step, *attention(rows, repeats))


def show(name: str, step: str, microseconds: float, size: float, right: bool) -> None:
    speed = f"{microseconds:8.0f} | {size / microseconds / 1e3:6.1f}"
    print(f"| {name:14} | {step:32} | {speed} | {'yes' if right else 'NO':5} |", flush=True)


if __name__ == "__main__":
    main()
