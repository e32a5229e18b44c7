"""Engines on a GPU, eager: tokens per second of 1 and of 8 requests, with the plain run's tokens to compare.

    PYTHONPATH=. python benchmarks/gpu_engine.py [CHECKPOINT ...]

Of each checkpoint (the bundled ones, if none is named) it builds an engine for the GPU that it finds. A line
per kind of drafts and number of requests: tokens per second, steps, kernels and their time in a step, and
whether all tokens are those of the plain run (no drafts, no reuse, one request after the other).
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.llm import LLM

NUM_TOKENS = 200
DEMO = Path(__file__).resolve().parents[1] / "demo"
PROMPTS = [
    "def ", "class Stack:\n    ", "import os\nimport ", "for i in range(", "# Returns the sum of\n",
    "try:\n    ", "if __name__ ==", "with open(",
]  # fmt: skip
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def kernels(llm: LLM, prompts: list[str]) -> tuple[float, float]:
    """Kernels of a step, and their microseconds."""
    before = llm.counters.num_steps
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
        torch.cuda.synchronize()
    num_steps = llm.counters.num_steps - before
    events = [event for event in found.events() if event.device_type.name == "CUDA"]
    return len(events) / num_steps, sum(event.device_time for event in events) / num_steps


def measure(llm: LLM, prompts: list[str]) -> tuple[list[list[int]], float, int]:
    """Tokens, seconds, steps; of the second of two runs, for the first compiles and learns."""
    llm.generate(prompts, GREEDY)
    steps, start = llm.counters.num_steps, time.perf_counter()
    outputs = llm.generate(prompts, GREEDY)
    seconds = time.perf_counter() - start
    return [output.token_ids for output in outputs], seconds, llm.counters.num_steps - steps


def report(checkpoint: Path, engine_dir: Path) -> None:
    """The lines of one checkpoint."""
    major, minor = torch.cuda.get_device_capability(0)
    build(checkpoint, engine_dir, Options(arch=f"sm_{major}{minor}", max_len=1024))
    plain: list[list[int]] = []
    for drafts in ("none", "ngram", "mtp"):
        start = time.perf_counter()
        with LLM(engine_dir, drafts=drafts, prefix_cache=False) as llm:
            print(
                f"{checkpoint.name}, drafts {drafts}: ready after {time.perf_counter() - start:.1f} s",
                flush=True,
            )
            if not plain:
                plain = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
            for num in (1, 8):
                found, seconds, num_steps = measure(llm, PROMPTS[:num])
                num_kernels, busy = kernels(llm, PROMPTS[:num])
                same = "the plain run's tokens" if found == plain[:num] else "OTHER TOKENS"
                print(
                    f"  {num} requests: {num * NUM_TOKENS / seconds:.0f} tokens/s, {num_steps} steps of"
                    f" {seconds / num_steps * 1e3:.2f} ms, {num_kernels:.0f} kernels of {busy / 1e3:.2f} ms"
                    f" in each, {same}",
                    flush=True,
                )


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    for name in sys.argv[1:] or [DEMO / "qwen3.5-code", DEMO / "nemotron-h-code"]:
        with tempfile.TemporaryDirectory() as folder:
            report(Path(name), Path(folder) / "engine")
