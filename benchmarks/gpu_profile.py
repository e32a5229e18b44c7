"""Kernels of a decode step and of a prompt on a GPU: how many, how long, and which group of them.

    PYTHONPATH=. python benchmarks/gpu_profile.py [--models 9b,0.8b] [--rows 1,64] [--drafts none,mtp]
        [--context 2048] [--prompts 8192,512] [--engines FOLDER]

Engines are those of gpu_models.py. A table per step: kernels, and "alone", the time in which no kernel that
began earlier still ran (a kernel may begin while the one before it ends); gaps are the times without any,
where they are shorter than LONG. Below it all gaps, also longer ones, by the kernels around them. Decode
steps are those that were seen whole; how many rows ran when the profiler began and ended stands in the title.
The profiler makes kernels a little slower than they are without it, and behind an engine that was closed it
called 32 dense layers of a prompt `_scan` (their handle had been that one's, it seems): where the host
launches all of a prompt's kernels one by one, names are those of its calls.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import gpu_models
import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from hemiola.plugins.gpu import launch
from hemiola.runtime.llm import LLM

LONG = 20.0  # microseconds: between steps, not within one
SECONDS = 0.15  # that decode steps are watched
TOKENS = 500  # of a row meanwhile, if it has room for them
SHOWN = 24  # kernels of a table
FIRST = "_fill"  # kernel of a step
SHORT = 1.0  # microseconds: a gap that is not shown
GROUPS = {
    "dense": (
        *("_tiles", "_persistent", "_dense", "_best_part", "_round"),
        *("_coded", "_coded_few", "_dense_steps", "_unpack", "_e4m3"),
    ),
    "experts": ("_experts", "_experts_persistent", "_sort", "_combine", "_copy_lines", "_route"),
    "attention": ("_write", "_attend", "_prompt", "_join", "_rope"),
    "recurrence": ("_weigh", "_step", "_scan"),
    "conv": ("_conv",),
    "norms": ("_norm",),
    "gates": ("_gate",),
    "ranks": ("_sum", "_agree", "_gather"),
}


class Kernel(NamedTuple):
    """One run of a kernel; microseconds."""

    name: str
    start: float
    end: float


class Sum(NamedTuple):
    """What kernels of a name or group took."""

    count: int = 0
    took: float = 0.0
    alone: float = 0.0

    def plus(self, took: float, alone: float) -> "Sum":
        return Sum(self.count + 1, self.took + took, self.alone + alone)


def summed(kernels: Iterable[Kernel]) -> tuple[dict[str, Sum], float]:
    """By name, and the gaps."""
    sums: dict[str, Sum] = {}
    reached, gaps = None, 0.0
    for name, start, end in sorted(kernels, key=lambda kernel: kernel.start):
        if reached is not None and 0 < start - reached < LONG:
            gaps += start - reached
        alone = end - start if reached is None else max(0.0, end - max(start, reached))
        sums[name] = sums.get(name, Sum()).plus(end - start, alone)
        reached = end if reached is None else max(reached, end)
    return sums, gaps


class Gap(NamedTuple):
    """The kernels around some times without any."""

    behind: str
    before: str


def gaps_of(kernels: Iterable[Kernel]) -> dict[Gap, Sum]:
    """All, by the kernels around them."""
    found: dict[Gap, Sum] = {}
    last = None
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if last is not None and (gap := kernel.start - last.end) >= SHORT:
            where = Gap(last.name, kernel.name)
            found[where] = found.get(where, Sum()).plus(gap, gap)
        last = kernel if last is None or kernel.end > last.end else last
    return found


def whole_steps(kernels: Iterable[Kernel]) -> tuple[list[Kernel], int]:
    """Kernels of the steps that were seen whole, and how many these are."""
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    begins = [n for n, kernel in enumerate(ordered) if kernel.name == FIRST]
    return (ordered[begins[0] : begins[-1]], len(begins) - 1) if begins else ([], 0)


def group_of(name: str) -> str:
    return next((group for group, names in GROUPS.items() if name in names), "the rest")


def table(title: str, kernels: list[Kernel], num_steps: int) -> None:
    """By group, then by kernel."""
    sums, gaps = summed(kernels)
    groups: dict[str, Sum] = {}
    for name, found in sums.items():
        mine = groups.setdefault(group_of(name), Sum())
        groups[group_of(name)] = Sum(*(a + b for a, b in zip(mine, found, strict=True)))
    print(f"\n### {title}: {len(kernels) / num_steps:.0f} kernels a step, of {num_steps} steps\n")
    print("| | a step | us each | ms a step | ms alone |\n|---|---|---|---|---|")
    ranked = sorted(sums.items(), key=lambda item: -item[1].alone)[:SHOWN]
    totals = [(f"**{group}**", groups[group]) for group in (*GROUPS, "the rest") if group in groups]
    for name, found in totals + ranked:
        per_step = f"{found.took / num_steps / 1e3:.3f} | {found.alone / num_steps / 1e3:.3f}"
        print(f"| {name} | {found.count / num_steps:.1f} | {found.took / found.count:.1f} | {per_step} |")
    print(f"| gaps | | | | {gaps / num_steps / 1e3:.3f} |", flush=True)
    if found := sorted(gaps_of(kernels).items(), key=lambda item: -item[1].took):
        print("\n| gap behind | before | a step | us each | ms a step |\n|---|---|---|---|---|")
    for (behind, before), gap in found[:SHOWN]:
        numbers = (
            f"{gap.count / num_steps:.1f} | {gap.took / gap.count:.1f} | {gap.took / num_steps / 1e3:.3f}"
        )
        print(f"| {behind} | {before} | {numbers} |", flush=True)


def kernels_of(found: Any) -> list[Kernel]:
    """What ran on the GPU while the profiler watched."""
    on_gpu = (event for event in found.events() or () if event.device_type.name == "CUDA")
    return [Kernel(_short(e.name), e.time_range.start, e.time_range.end) for e in on_gpu]


def _short(name: str) -> str:
    return name.partition("(")[0].partition("<")[0].removeprefix("void ")[-60:]


@contextmanager
def launched() -> Iterator[list[str]]:
    """Names of the kernels that the host launches, in order; those of graphs are not among them."""
    names, plain = [], launch.Kernel._launch

    def note(kernel: launch.Kernel, grid: tuple[int, ...], *values: Any, **constants: Any) -> None:
        if 0 not in grid:
            names.append(kernel.entry)
        plain(kernel, grid, *values, **constants)

    launch.Kernel._launch = note
    try:
        yield names
    finally:
        launch.Kernel._launch = plain


def renamed(kernels: list[Kernel], names: list[str]) -> list[Kernel]:
    """By the host's names, if it launched as many of ours as ran; kernels of a stream begin in that order."""
    ours = [n for n, kernel in enumerate(kernels) if kernel.name.startswith("_")]
    ours.sort(key=lambda n: kernels[n].start)
    if len(ours) != len(names):
        return kernels
    known = dict(zip(ours, names, strict=True))
    return [kernel._replace(name=known.get(n, kernel.name)) for n, kernel in enumerate(kernels)]


def decode(llm: LLM, prompts: list[list[int]], title: str) -> None:
    """The table of a step while all rows decode."""
    gpu_models.decode(llm, prompts, (0, 8))
    with profile(activities=[ProfilerActivity.CUDA]):
        pass  # a process's first takes a second to begin, and rows may have ended then
    done = gpu_models.begun(llm, prompts, min(TOKENS, llm.config.max_len - max(map(len, prompts))))
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        rows = [llm.load().num_running]
        time.sleep(SECONDS)
        rows.append(llm.load().num_running)
    done.wait()
    kernels, num_steps = whole_steps(kernels_of(found))
    each = (kernels[-1].end - kernels[0].start) / num_steps / 1e3 if num_steps else math.nan
    table(f"{title} ({rows[0]} rows ran, then {rows[1]}; {each:.2f} ms)", kernels, max(num_steps, 1))


def prompt(llm: LLM, token_ids: list[int], title: str) -> None:
    """The table of a prompt's only step."""
    gpu_models.first_token(llm, token_ids[::-1])
    with launched() as names, profile(activities=[ProfilerActivity.CUDA]) as found:
        gpu_models.first_token(llm, token_ids)
        torch.cuda.synchronize()
    seen = kernels_of(found)
    kernels = renamed(seen, names)
    table(title, kernels, 1)
    num = sum(a.name != b.name for a, b in zip(seen, kernels, strict=True))
    print(f"\n{len(names)} of them launched by the host; the profiler had {num} other names", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="9b,0.8b")
    parser.add_argument("--rows", default="1,64")
    parser.add_argument("--drafts", default="none,mtp")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompts", default="8192,512")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of an engine; of the first is shown")
    parser.add_argument("--engines", type=Path, help="where engines are kept; default: a temporary folder")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_profile.py: torch finds no CUDA device here")
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    with tempfile.TemporaryDirectory() as folder:
        for model in asked.models.split(","):
            run(asked, model, asked.engines or Path(folder))


def run(asked: argparse.Namespace, model: str, folder: Path) -> None:
    """All tables of a model."""
    rows = [int(num) for num in asked.rows.split(",")]
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 100_000, (max(rows), asked.context)).tolist()
    engine_dir = gpu_models.made(model, folder, max(rows), asked.context + 1024, asked.tp)
    for drafts in asked.drafts.split(","):
        options = {} if drafts == "none" else {"num_drafts": gpu_models.NUM_DRAFTS, "adaptive_drafts": False}
        with LLM(engine_dir, drafts=drafts, prefix_cache=False, **options) as llm:
            for num in rows:
                decode(llm, prompts[:num], f"{model}, drafts {drafts}, {num} rows")
    lengths = [int(length) for length in asked.prompts.split(",") if length]
    if not lengths:
        return
    sizes = gpu_models.PROMPT_ROWS, gpu_models.SHARED_LEN + 1024
    engine_dir = gpu_models.made(model, folder, *sizes, asked.tp)
    with LLM(engine_dir, drafts="none", prefix_cache=False) as llm:
        for length in lengths:
            prompt(llm, rng.integers(0, 100_000, length).tolist(), f"{model}, a prompt of {length}")


if __name__ == "__main__":
    main()
