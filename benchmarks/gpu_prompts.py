"""First tokens of prompts on a GPU, and how long the host launches their steps.

    PYTHONPATH=. python benchmarks/gpu_prompts.py [--model 0.8b] [--drafts none,mtp] [--tokens 60,200,1000]
        [--engines FOLDER]

Two trees are compared by running this file with the PYTHONPATH of each, in turn, on the same engines.
Milliseconds, the median of 15; the last column is a digest of the tokens.
"""

import argparse
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

import gpu_models
import numpy as np
import torch

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.llm import LLM
from hemiola.runtime.schedule.plan import Launched, Plan

RULES = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 1}}


def lines(llm: LLM, drafts: str, lengths: list[int]) -> None:
    """One for each rule and length."""
    hosts: list[float] = []
    steps = llm._loop.steps
    launch = steps.launch

    def timed(plan: Plan) -> Launched:
        start = time.perf_counter()
        launched = launch(plan)
        hosts.append(time.perf_counter() - start)
        return launched

    steps.launch = timed
    for name, rule in RULES.items():
        for length in lengths:
            firsts, launches, tokens = [], [], []
            for n in range(15):
                prompt = np.random.default_rng(length + n).integers(0, 100_000, length).tolist()
                hosts.clear()
                start = time.perf_counter()
                (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True, **rule))
                firsts.append(1e3 * (time.perf_counter() - start))
                launches.append(1e3 * hosts[0])
                tokens += output.token_ids
            first, host = statistics.median(firsts), statistics.median(launches)
            digest = zlib.crc32(str(tokens).encode())
            print(f"| {drafts} | {name} | {length} | {first:.2f} | {host:.2f} | {digest:08x} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="0.8b")
    parser.add_argument("--drafts", default="none,mtp")
    parser.add_argument("--tokens", default="60,200,512,1000")
    parser.add_argument("--engines", type=Path, help="where engines are kept; default: a temporary folder")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_prompts.py: torch finds no CUDA device here")
    with tempfile.TemporaryDirectory() as folder:
        engine = gpu_models.made(asked.model, asked.engines or Path(folder), 64, 3072)
        print("| drafts | rule | tokens | ms to the first token | host | tokens' digest |")
        print("|---|---|---|---|---|---|")
        for drafts in asked.drafts.split(","):
            with LLM(engine, drafts=drafts, adaptive_drafts=False, prefix_cache=False) as llm:
                lines(llm, drafts, [int(length) for length in asked.tokens.split(",")])


if __name__ == "__main__":
    main()
