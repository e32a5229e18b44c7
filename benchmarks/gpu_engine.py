"""Engines on a GPU: tokens per second of 1 and of 8 requests, with the plain run's tokens to compare.

    PYTHONPATH=. python benchmarks/gpu_engine.py [CHECKPOINT ...]

Of each checkpoint (the bundled ones, if none is named) it builds an engine for the GPU that it finds. A line
per kind of drafts, with CUDA graphs and without, and number of requests: tokens per second, steps, kernels
and their time in a step; of the time between two steps' beginnings, how much the GPU had no step to do; and
whether all tokens are those of the plain run (no graphs, no drafts, no reuse, one request after the other).
"""

import itertools
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.arch import arch_here
from hemiola.runtime.llm import LLM

NUM_TOKENS = 80  # of a request; a step without a graph takes 10 ms, and the plain run has 8 requests of them
EAGER, PROFILED = 20, 24  # tokens of a request where steps are eager, and where kernels are counted
DEMO = Path(__file__).resolve().parents[1] / "demo"
PROMPTS = [
    "def ", "class Stack:\n    ", "import os\nimport ", "for i in range(", "# Returns the sum of\n",
    "try:\n    ", "if __name__ ==", "with open(",
]  # fmt: skip


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def kernels(llm: LLM, prompts: list[str]) -> tuple[float, float]:
    """Kernels of a step, and their microseconds."""
    before = llm.counters.num_steps
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        llm.generate(prompts, greedy(PROFILED))
        torch.cuda.synchronize()
    num_steps = llm.counters.num_steps - before
    events = [event for event in found.events() or () if event.device_type.name == "CUDA"]
    return len(events) / num_steps, sum(event.device_time for event in events) / num_steps


class Run(NamedTuple):
    token_ids: list[list[int]]
    seconds: float
    num_steps: int
    idle: float  # share of the time


def measure(llm: LLM, prompts: list[str], num_tokens: int) -> Run:
    """The second of two runs, for the first compiles and learns."""
    llm.generate(prompts, greedy(num_tokens))
    before, start = replace(llm.counters), time.perf_counter()
    outputs = llm.generate(prompts, greedy(num_tokens))
    seconds = time.perf_counter() - start
    busy = llm.counters.device_seconds - before.device_seconds
    num_steps = llm.counters.num_steps - before.num_steps
    return Run([output.token_ids for output in outputs], seconds, num_steps, 1 - busy / seconds)


def report(checkpoint: Path, engine_dir: Path) -> None:
    """The lines of one checkpoint."""
    build(checkpoint, engine_dir, Options(arch=arch_here(), max_len=1024, max_rows=8))
    with LLM(engine_dir, drafts="none", prefix_cache=False, cuda_graphs=False) as llm:
        plain = [llm.generate([prompt], greedy(NUM_TOKENS))[0].token_ids for prompt in PROMPTS]
    for drafts, graphs in itertools.product(("none", "ngram", "mtp"), (True, False)):
        start = time.perf_counter()
        how, num_tokens = ("graphs", NUM_TOKENS) if graphs else ("eager", EAGER)
        with LLM(engine_dir, drafts=drafts, prefix_cache=False, cuda_graphs=graphs) as llm:
            ready = time.perf_counter() - start
            for num in (1, 8):
                found = measure(llm, PROMPTS[:num], num_tokens)
                num_kernels, busy = kernels(llm, PROMPTS[:num])
                same = found.token_ids == [ids[:num_tokens] for ids in plain[:num]]
                print(
                    f"| {checkpoint.name} | {drafts} | {how} | {ready:.1f} | {num} |"
                    f" {num * num_tokens / found.seconds:.0f} | {found.num_steps} |"
                    f" {found.seconds / found.num_steps * 1e3:.2f} | {num_kernels:.0f} | {busy / 1e3:.2f} |"
                    f" {found.idle:.0%} | {'equal' if same else 'OTHER TOKENS'} |",
                    flush=True,
                )


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("gpu_engine.py: torch finds no CUDA device here")
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    print("| checkpoint | drafts | | ready, s | requests | tokens/s | steps | ms | kernels | ms | idle | |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or [DEMO / "qwen3.5-code", DEMO / "nemotron-h-code"]:
        with tempfile.TemporaryDirectory() as folder:
            report(Path(name), Path(folder) / "engine")
