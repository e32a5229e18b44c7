"""Storms of engines on the GPU that is here, in processes that share it, until the time is up.

    PYTHONPATH=.:tests python3 scripts/gpu_storms.py [--seconds 180] [--processes 14] [--turns 200] [--seed 0]

A storm (tests/kit/engine_storms.py) is so many turns of arrivals, drafts, aborts, preemptions and flushes on
a bundled checkpoint's engine with graphs; every logit, token, page and snapshot is the plain run's. Storms of
a seed use one engine, one after the other. A failure prints its seed:
`--seed N --processes 1 --seconds 1` repeats it.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from queue import Empty

import torch

AT_ONCE = 5  # storms on an engine, before another seed makes its own


def work(folder: Path, first: int, step: int, turns: int, until: float, found: multiprocessing.Queue) -> None:
    """Seeds first, first + step, ...: (seed, steps, what went wrong)."""
    torch.set_num_threads(1)
    from kit.gpu_engines import Engines

    engines, seed = Engines(folder), first
    while time.time() < until:
        try:
            found.put((seed, engines.storm(seed, turns, AT_ONCE), ""))
        except Exception:
            found.put((seed, 0, traceback.format_exc(limit=-6)))
        seed += step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_storms.py: torch finds no CUDA device here")
    print(torch.cuda.get_device_name(0))
    with tempfile.TemporaryDirectory() as folder:
        engines = Path(os.environ.get("GPU_ENGINES", folder))  # what tests have built is not built again
        storms, steps, failed = stormed(engines, asked)
    print(f"| {storms} storms of {asked.turns} turns | {steps} steps | {failed} seeds failed |")
    sys.exit(failed > 0)


def stormed(folder: Path, asked: argparse.Namespace) -> tuple[int, int, int]:
    """Storms, their steps, and seeds that failed."""
    context = multiprocessing.get_context("spawn")
    found, until = context.Queue(), time.time() + asked.seconds
    fixed = asked.processes, asked.turns, until, found
    processes = [
        context.Process(target=work, args=(folder, asked.seed + n, *fixed), daemon=True)
        for n in range(asked.processes)
    ]
    for process in processes:
        process.start()
    storms = steps = failed = 0
    while any(process.is_alive() for process in processes) or not found.empty():
        try:
            seed, num, wrong = found.get(timeout=1)
        except Empty:
            if time.time() > until + 60:
                break  # somebody hangs, or a storm is very long
            continue
        storms, steps, failed = storms + AT_ONCE * (not wrong), steps + num, failed + bool(wrong)
        print(f"seed {seed}: {wrong or f'{num} steps'}", flush=True)
    return storms, steps, failed


if __name__ == "__main__":
    main()
