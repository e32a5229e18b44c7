"""Adaptive drafts against none and always K, on one thread: CPU seconds, and the same tokens from all.

    PYTHONPATH=. python benchmarks/adaptive_drafts.py ENGINE_DIR --checkpoint demo/qwen3.5-code

Prompts are the standard library's sources, and random tokens; "sampled": the sources at temperature 2, where
drafts are seldom right (seeded, so that the tokens are the same). Modes take turns, the least CPU seconds of
all repeats count. Ends with an error if any mode's tokens differ.
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
    "mtp, always K": {"drafts": "mtp", "adaptive_drafts": False},
    "mtp, adaptive": {"drafts": "mtp"},
    "ngram, always K": {"drafts": "ngram", "adaptive_drafts": False},
    "ngram, adaptive": {"drafts": "ngram"},
}


def texts(kind: str, checkpoint: Path, count: int, length: int) -> list[list[int]]:
    if kind == "random":
        return [random.Random(seed).choices(range(3, 4096), k=length) for seed in range(count)]
    return [ids[:length] for ids in prompts(checkpoint, count)]


def measure(
    llms: dict[str, LLM], ids: list[list[int]], params: SamplingParams, repeats: int
) -> list[list[str]]:
    best = dict.fromkeys(llms, float("inf"))
    accepted: dict[str, float] = {}
    expected: list[list[int]] | None = None
    for _ in range(repeats):
        for mode, llm in llms.items():
            start = time.process_time()
            outs = llm.generate(ids, params)
            best[mode] = min(best[mode], time.process_time() - start)
            found = [list(out.token_ids) for out in outs]
            expected = expected or found
            if found != expected:
                sys.exit(f"error: tokens of mode {mode!r} differ: the times mean nothing")
            windows = sum(out.metrics.drafted[0] for out in outs if out.metrics.drafted)
            accepted[mode] = sum(sum(out.metrics.accepted) for out in outs) / max(windows, 1)
    return [
        [mode, f"{best[mode]:.2f}", f"{best['none'] / best[mode]:.2f}", f"{accepted[mode]:.2f}"]
        for mode in llms
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
    print("| engine | prompts | requests | drafts | CPU s | none / this | accepted per window |")
    print("|---|---|---|---|---|---|---|")
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
