"""Paged attention on a GPU: bits of 4 queries against one at a time,
then time against bytes of keys and values.

PYTHONPATH=.:tests python3 benchmarks/gpu_attention.py [--plans '[null, [16, 4, 4, 2]]'] [--pages auto fp8]
    [--loads '[[8, 32768]]'] [--prefill 8192]
"""

import argparse
import itertools
import json
import sys
from functools import partial

import torch
from gpu_recurrences import copy_bandwidth, tests_of, timed

from hemiola.plugins.attention.pages import CODES, FORMATS, NOTE_BYTES, NOTES
from hemiola.plugins.gpu.compile import on_demand

MODELS = {  # query heads, key heads, head size
    "9B": (16, 4, 256),
    "Nano-9B": (40, 8, 128),
    "30B-A3B": (32, 2, 128),
}
LOADS = ((1, 32768), (8, 32768), (64, 2048), (256, 2048))  # rows, keys of each


class Decode:
    """A batch of rows that all hold as many keys, over pages in random order."""

    def __init__(self, model: str, num_rows: int, num_keys: int, num: int, kv: str, plan: object) -> None:
        heads, groups, depth = MODELS[model]
        module = tests_of("attention")
        self.case = module.Case(heads=heads, groups=groups, depth=depth, page_len=64, kv=kv, plan=plan)
        width = num_keys // 64 + 1
        form, wide = FORMATS[kv], torch.bfloat16
        kinds = list(zip(("key", "value"), form.widths(depth), form.dtypes(wide), strict=True))
        token_bytes = groups * sum(each * dtype.itemsize for _, each, dtype in kinds)
        num_pages = num_rows * width + 1
        self.num_sets = max(1, min(8, int(3e8 / (64 * token_bytes * num_pages))))
        self.pools = []
        for _ in range(self.num_sets):
            self.pools.append(
                [filled(part, num_pages, groups, depth, width, dtype) for part, width, dtype in kinds]
            )
        self.table = (torch.randperm(num_pages - 1, device="cuda") + 1).int().view(num_rows, width)
        at = num_keys - num
        rows = [(n * num, num, num - 1, n + 1, at, 0, 0, 0) for n in range(num_rows)]
        self.rows = torch.tensor(rows, dtype=torch.int32, device="cuda")
        self.positions = (at + torch.arange(num, device="cuda").repeat(num_rows)).int()
        self.tokens = self.case.tokens(num_rows * num)
        self.bytes = num_rows * num_keys * token_bytes
        self.kernels, self.scale, self.plan = (
            module.kernels(),
            depth**-0.5,
            plan and module.kernels().TilePlan(*plan),
        )

    def run(self, i: int) -> torch.Tensor:
        return self.kernels.attention(
            *self.tokens,
            *self.pools[i],
            self.table,
            self.rows,
            self.positions,
            self.scale,
            0,
            1.0,
            1.0,
            plan=self.plan,
        )

    def one_by_one(self, num: int) -> bool:
        """Whether every query alone gives the bits it has among its row's."""
        together, last = self.run(0), 0
        for i in range(num):
            rows = self.rows.clone()
            rows[:, 0], rows[:, 1], rows[:, 2] = torch.arange(len(rows)), 1, 0
            rows[:, 4] += i
            tokens = [t[i::num] for t in self.tokens]
            alone = self.kernels.attention(
                *tokens,
                *self.pools[0],
                self.table,
                rows,
                self.positions[i::num].contiguous(),
                self.scale,
                0,
                1.0,
                1.0,
            )
            last += torch.equal(alone, together[i::num])
        return last == num


def filled(
    part: str, num_pages: int, groups: int, depth: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Pages of random numbers, or of random codes with 1 for what gives them a size."""
    if dtype is not CODES:
        return torch.randn(num_pages, 64, groups, depth, device="cuda", dtype=torch.bfloat16).to(dtype)
    pool = torch.randint(0, 256, (num_pages, 64 * groups * width), device="cuda", dtype=CODES)
    pool[:, -64 * groups * NOTES[part] * NOTE_BYTES :].view(torch.float16).fill_(1.0)
    return pool.view(num_pages, 64, groups, width)


def decode(models: list[str], plans: list, copy: float, kinds: list[str], loads: list[list[int]]) -> None:
    print(
        f"| model | rows | keys | pages | tokens | us | TB/s | of {copy:.2f} TB/s | over one token | bits |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for model in models:
        for num_rows, num_keys in loads:
            for kv in kinds:
                for plan in plans:
                    times = {}
                    pages = kv.removeprefix("turboquant_")
                    label = f"{model} {MODELS[model]} {plan or ''} | {num_rows} | {num_keys} | {pages}"
                    for num in (1, 4):
                        load = Decode(model, num_rows, num_keys, num, kv, plan)
                        same = "equal" if load.one_by_one(num) else "OTHER BITS"
                        times[num] = timed(load.run, load.num_sets)
                        rate = load.bytes / times[num] / 1e6
                        speed = f"{times[num]:.1f} | {rate:.2f} | {rate / copy:.0%}"
                        print(
                            f"| {label} | {num} | {speed} | {times[num] / times[1]:.2f} | {same} |",
                            flush=True,
                        )
                        del load


def prefill(num_tokens: int, plans: list, kinds: list[str]) -> None:
    print("| model | tokens of a prompt | pages | us | TFLOP/s |\n|---|---|---|---|---|")
    for model, (heads, groups, depth) in MODELS.items():
        for plan, kv in itertools.product(plans, kinds):
            case = tests_of("attention").Case(heads=heads, groups=groups, depth=depth, plan=plan, kv=kv)
            tokens, num = case.tokens(num_tokens), -(-num_tokens // 64)
            pools = case.pools(num + 1)
            table = torch.arange(1, num + 1, dtype=torch.int32, device="cuda").view(1, -1)
            rows = torch.tensor([[0, num_tokens, 0, 1, 0, 0, 0, 0]], dtype=torch.int32, device="cuda")
            at, kernels = torch.arange(num_tokens, device="cuda").int(), tests_of("attention").kernels()
            cut = plan and kernels.TilePlan(*plan)
            call = partial(kernels.attention, *tokens, *pools, table, rows, at, *case.numbers, plan=cut)
            us = timed(lambda _, call=call: call(), 1)
            work = 2 * num_tokens**2 * heads * depth
            print(
                f"| {model} {plan or ''} | {num_tokens} | {kv} | {us:.0f} | {work / us / 1e6:.0f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plans", default="[null]")
    parser.add_argument("--loads", default=json.dumps(LOADS))
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--prefill-plans", default="[null]")
    parser.add_argument("--pages", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_attention.py: torch finds no CUDA device here")
    on_demand()
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    decode(options.models, json.loads(options.plans), copy, options.pages, json.loads(options.loads))
    if options.prefill:
        prefill(options.prefill, json.loads(options.prefill_plans), options.pages)


if __name__ == "__main__":
    main()
