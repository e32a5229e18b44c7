"""Storms of engines on the GPU that is here, in processes that share it, until the time is up.

    PYTHONPATH=.:tests python3 scripts/gpu_storms.py [--seconds 180] [--processes 8] [--turns 200] [--seed 0]

A storm (tests/kit/engine_storms.py) is so many turns of arrivals of several priorities (greedy, drawn, with
penalties, with grammars; n at once), drafts, aborts, preemptions, flushes and rows struck by NaN, on a
bundled checkpoint's engine with graphs. Struck rows end with an error; all other logits and tokens, and every
page and snapshot, are the plain run's. Storms of a seed use one engine, one after the other. Processes take
turns on a GPU; each of eight is nearly as fast as one alone. A failure prints its seed:
`--seed N --processes 1` repeats it. What an interrupt finds half done is not counted. A process that is still
in a storm a minute behind the end hangs, and counts as failed; one whose engines do not open, three seeds in
a row, stops.
"""

import argparse
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from kit.gpu_engines import Engines  # in the processes

AT_ONCE = 16  # storms on an engine, before another seed makes its own
LAST = 8  # seconds before the end in which no storm begins
LOST = 3  # seeds in a row whose engines did not open: a GPU that is lost is so for the whole process


class Found(NamedTuple):
    """Of a seed: its engine is open (no steps), or a storm is over, or something went wrong."""

    seed: int
    steps: int
    seconds: float
    wrong: str = ""


def work(folder: Path, first: int, step: int, turns: int, until: float, queue: "Queue[Found]") -> None:
    """Seeds first, first + step, ..., some storms of each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's
    torch.set_num_threads(1)
    from kit.gpu_engines import Engines

    engines, start, failed = Engines(folder), time.time(), 0
    for seed in itertools.count(first, step):
        try:
            for steps in opened(engines, seed, turns):
                start, began, failed = time.time(), start, 0
                queue.put(Found(seed, steps, start - began))
                if start > until - LAST:
                    return
        except Exception:
            queue.put(Found(seed, 0, 0.0, traceback.format_exc(limit=-6)))
            failed += 1
            if failed == LOST or time.time() > until - LAST:
                return


def opened(engines: "Engines", seed: int, turns: int) -> Iterator[int]:
    """No steps, as soon as the seed's engine is open; then the steps of each storm."""
    storms = engines.storms(seed, turns)
    yield 0
    yield from itertools.islice(storms, AT_ONCE)


@dataclass
class Tally:
    storms: int = 0
    steps: int = 0
    seconds: float = 0.0
    engines: int = 0
    opening: float = 0.0  # seconds; a process's first is its start, too
    failed: int = 0

    def count(self, report: Found) -> None:
        if report.wrong:
            self.failed += 1
        elif report.steps:
            self.storms, self.steps = self.storms + 1, self.steps + report.steps
            self.seconds += report.seconds
        else:
            self.engines, self.opening = self.engines + 1, self.opening + report.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_storms.py: torch finds no CUDA device here")
    print(torch.cuda.get_device_name(0))
    for word in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs begin deaf to the first
        signal.signal(word, signal.default_int_handler)
    done = Tally()
    with tempfile.TemporaryDirectory() as folder:
        engines = Path(os.environ.get("GPU_ENGINES", folder))  # what tests have built is not built again
        with suppress(KeyboardInterrupt):
            stormed(engines, asked, done)
    mean, opening = done.seconds / max(done.storms, 1), done.opening / max(done.engines, 1)
    print(
        f"| {done.storms} storms of {asked.turns} turns | {done.steps} steps | {mean:.2f} s each,"
        f" {asked.processes} at once | {done.engines} engines, {opening:.1f} s each"
        f" | {done.failed} seeds failed |",
        flush=True,
    )
    sys.exit(done.failed > 0 or done.storms == 0)


def stormed(folder: Path, asked: argparse.Namespace, done: Tally) -> None:
    """Until the time is up, and the last storms are done."""
    context = multiprocessing.get_context("spawn")
    queue, until = context.Queue(), time.time() + asked.seconds
    fixed = asked.processes, asked.turns, until, queue
    processes = [
        context.Process(target=work, args=(folder, asked.seed + n, *fixed), daemon=True)
        for n in range(asked.processes)
    ]
    for process in processes:
        process.start()
    try:
        while not queue.empty() or (any(p.is_alive() for p in processes) and time.time() < until + 60):
            try:
                one = queue.get(timeout=1)
            except Empty:
                continue
            done.count(one)
            said = f"{f'{one.steps} steps' if one.steps else 'open'} in {one.seconds:.1f} s"
            print(f"seed {one.seed}: {one.wrong or said}", flush=True)
        for process in (p for p in processes if p.is_alive()):
            done.failed += 1
            print(f"{process.name} hangs", flush=True)
    finally:
        for process in processes:
            process.kill()


if __name__ == "__main__":
    main()
