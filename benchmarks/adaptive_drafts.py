"""Adaptive drafts against none and always as many, on one thread: CPU seconds, and the same tokens from all.

    PYTHONPATH=. python benchmarks/adaptive_drafts.py ENGINE_DIR --checkpoint demo/qwen3.5-code

Prompts are the standard library's sources, and random tokens; "sampled": the sources at temperature 2, where
drafts are seldom right (seeded, so that the tokens are the same). Modes take turns, the least CPU seconds of
all repeats count; of the prompts: in a run that ends with the first token. Counts are of the last repeat:
decode steps, and per row of them how many drafts were verified and how many stayed. Ends with an error if any
mode's tokens differ.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from generate_cpu import prompts

from hemiola import LLM, SamplingParams

MODES = {
    "none": {"drafts": "none"},
    "mtp, always 1": {"drafts": "mtp", "adaptive_drafts": False, "num_drafts": 1},
    "mtp, always K": {"drafts": "mtp", "adaptive_drafts": False},
    "mtp, adaptive": {"drafts": "mtp"},
    "ngram, always K": {"drafts": "ngram", "adaptive_drafts": False},
    "ngram, adaptive": {"drafts": "ngram"},
}


def texts(kind: str, checkpoint: Path, count: int, length: int) -> list[list[int]]:
    if kind == "random":
        return [random.Random(seed).choices(range(3, 4096), k=length) for seed in range(count)]
    return [ids[:length] for ids in prompts(checkpoint, count)]


class Mode:
    """An engine with some drafts, and the best of what was measured of it."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.whole, self.prompts = llm, float("inf"), float("inf")
        self.num_steps = self.num_drafted = self.num_accepted = 0

    def run(self, ids: list[list[int]], params: SamplingParams) -> list[list[int]]:
        first = SamplingParams(max_tokens=1, temperature=params.temperature, seed=params.seed)
        start = time.process_time()
        self.llm.generate(ids, first)
        self.prompts = min(self.prompts, time.process_time() - start)
        counters = self.llm.counters
        before = counters.num_steps - counters.num_prompt_steps
        start = time.process_time()
        outs = self.llm.generate(ids, params)
        self.whole = min(self.whole, time.process_time() - start)
        self.num_steps = counters.num_steps - counters.num_prompt_steps - before
        self.num_drafted = sum(sum(out.metrics.drafted) for out in outs)
        self.num_accepted = sum(sum(out.metrics.accepted) for out in outs)
        return [list(out.token_ids) for out in outs]


def measure(
    llms: dict[str, LLM], ids: list[list[int]], params: SamplingParams, repeats: int
) -> list[list[str]]:
    modes = {name: Mode(llm) for name, llm in llms.items()}
    expected: list[list[int]] | None = None
    for _ in range(repeats):
        for name, mode in modes.items():
            found = mode.run(ids, params)
            expected = expected or found
            if found != expected:
                sys.exit(f"error: tokens of mode {name!r} differ: the times mean nothing")
    usual = modes["none"].whole
    return [[name, *_cells(mode, usual, len(ids))] for name, mode in modes.items()]


def _cells(mode: Mode, usual: float, num_rows: int) -> list[str]:
    seconds = [f"{mode.whole:.2f}", f"{usual / mode.whole:.2f}", f"{mode.prompts:.2f}"]
    rows = mode.num_steps * num_rows
    return [
        *seconds,
        str(mode.num_steps),
        *(f"{n / rows:.2f}" for n in (mode.num_drafted, mode.num_accepted)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--checkpoint", type=Path, required=True, help="for its tokenizer")
    parser.add_argument(
        "--prompts", nargs="+", default=["code", "random", "sampled"], choices=["code", "random", "sampled"]
    )
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8], help="requests at once")
    parser.add_argument("--length", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| engine | prompts | requests | drafts | CPU s | none / this | of the prompts | decode steps"
        " | drafts a row | kept |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for kind in args.prompts:
        for count in args.counts:
            llms = {mode: LLM(args.engine, prefix_cache=False, **options) for mode, options in MODES.items()}
            ids = texts(kind, args.checkpoint, count, args.length)
            temperature = 2.0 if kind == "sampled" else 0.0
            params = SamplingParams(
                max_tokens=args.num_tokens, ignore_eos=True, temperature=temperature, seed=1
            )
            for cells in measure(llms, ids, params, args.repeats):
                head = [args.checkpoint.name, kind, str(count)]
                print(f"| {' | '.join([*head, *cells])} |", flush=True)
            for llm in llms.values():
                llm.close()


if __name__ == "__main__":
    main()
