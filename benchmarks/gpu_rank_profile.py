"""Which rank is late: decode steps of an engine of several GPUs, watched on the first two at once.

    PYTHONPATH=. python3 benchmarks/gpu_rank_profile.py [--models 9b] [--rows 64] [--drafts none,mtp]
        [--context 2048] [--tp 2] [--engines FOLDER] [--keep FOLDER]

Engines are those of gpu_models.py. Of each step: milliseconds from one to the next without the profiler; what
hosts took; kernels by name on both GPUs; and of the sums, by their place in the step, when each rank began
(microseconds, against the other), and how long after the later one they ended. Clocks of the two GPUs are put
together by the ends of the sums. --keep: kernels of both, as .npz.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 0.25  # that decode steps are watched
LONG = 20.0  # microseconds: between steps, not within one
took: dict[str, list[float]] = defaultdict(list)  # seconds of this process's host


def timed(owner: Any, name: str, label: str = "") -> None:
    """Note how long each call takes."""
    plain = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return plain(*given, **named)
        finally:
            took[label or f"{owner.__name__}.{name}"].append(time.perf_counter() - start)

    setattr(owner, name, call)


def host_table(who: str) -> None:
    """Medians since the last table."""
    for label, found in took.items():
        if found:
            found = found[-200:]
            high = sorted(found)[int(0.95 * len(found))]
            print(
                f"| {who} | {label} | {1e6 * statistics.median(found):.0f} | {1e6 * high:.0f} |", flush=True
            )
    took.clear()


def watch(start: Callable[[], None], until: Callable[[], None], path: Path) -> None:
    """Kernels that run on this process's GPU meanwhile, into a file."""
    start()
    with profiled() as found:
        until()
    on_gpu = [event for event in found.events() or () if event.device_type.name == "CUDA"]
    names = [event.name.partition("(")[0].partition("<")[0].removeprefix("void ")[-40:] for event in on_gpu]
    starts = np.array([event.time_range.start for event in on_gpu])
    ends = np.array([event.time_range.end for event in on_gpu])
    temporary = path.with_suffix(".tmp.npz")
    np.savez_compressed(temporary, names=np.array(names), starts=starts, ends=ends)
    temporary.rename(path)


def profiled() -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.002)


def follow(folder: Path) -> None:
    """A follower whose GPU is watched whenever the leader asks."""
    from hemiola.runtime.device.graphs import Graphs
    from hemiola.runtime.device.ring import RecordReader
    from hemiola.runtime.step import follower

    timed(RecordReader, "read")
    timed(follower.Replica, "run")
    timed(follower, "unpacked", "unpacked")
    timed(Graphs, "replay")

    def look() -> None:
        number = 0
        while True:
            watch(
                lambda: wait_for(folder / f"start-{number}"),  # noqa: B023
                lambda: wait_for(folder / f"stop-{number}"),  # noqa: B023
                folder / f"follower-{number}.npz",
            )
            host_table("follower")
            number += 1

    with profiled():  # it wants to be made by this thread
        pass
    threading.Thread(target=look, daemon=True).start()
    follower.main()


def decode(llm: Any, prompts: list[list[int]], folder: Path, number: int) -> tuple[dict, dict]:
    """Kernels of both GPUs while all rows decode."""
    import gpu_models

    gpu_models.decode(llm, prompts, (0, 8))
    found = gpu_models.decode(llm, prompts, (0, 40), (40, 120))
    for one in found:
        print(
            f"* steps {one.steps}: {one.step_ms:.2f} ms each, GPU without a step {one.idle:.1%}", flush=True
        )
    took.clear()
    with profiled():  # the first takes a second to begin
        pass
    done = gpu_models.begun(llm, prompts, 260)
    time.sleep(0.1)
    (folder / f"start-{number}").touch()

    def until() -> None:
        time.sleep(SECONDS)
        (folder / f"stop-{number}").touch()

    watch(lambda: None, until, folder / f"leader-{number}.npz")
    host_table("leader")
    done.wait()
    wait_for(folder / f"follower-{number}.npz")
    return load(folder / f"leader-{number}.npz"), load(folder / f"follower-{number}.npz")


def sequences(llm: Any, prompts: list[list[int]]) -> None:
    """Milliseconds of the GPU's steps, one by one, in ways of running that can be changed meanwhile."""
    import os

    import gpu_models

    pid = next(one.process.pid for one in llm._loop.steps._followers._followers)
    cores = sorted(os.sched_getaffinity(0))

    def pinned(own: set[int], theirs: set[int]) -> None:
        for process, chosen in ((os.getpid(), own), (pid, theirs)):
            for task in Path(f"/proc/{process}/task").iterdir():
                os.sched_setaffinity(int(task.name), chosen)

    ways: dict[str, Callable[[], None]] = {
        "as it is": lambda: None,
        "half of the cores each": lambda: pinned({*cores[: len(cores) // 2]}, {*cores[len(cores) // 2 :]}),
    }
    gpu_models.decode(llm, prompts, (0, 8))
    for name, change in ways.items():
        change()
        took_gpu.clear()
        found = gpu_models.decode(llm, prompts, (0, 40), (40, 120))
        own = np.array([1e3 * seconds for rows, seconds in took_gpu if rows == len(prompts)])[3:]
        shown = ", ".join(f"{number:.2f}" for number in np.quantile(own, (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)))
        means = ", ".join(f"{one.step_ms:.2f}" for one in found)
        print(f"* {name}: {means} ms a step; GPU's steps: {shown}", flush=True)
        print("  " + " ".join(f"{number:.1f}" for number in own[:100]), flush=True)
    pinned({*cores}, {*cores})


took_gpu: list[tuple[int, float]] = []  # rows of a step that only decodes, and its seconds


def watch_steps() -> None:
    from hemiola.runtime.schedule.loop import Loop

    plain = Loop._clock

    def clock(self: Any, flight: Any, num_decodes: int) -> None:
        if num_decodes == len(flight.plan.rows):
            took_gpu.append((num_decodes, sum(flight.output.seconds())))
        plain(self, flight, num_decodes)

    Loop._clock = clock


def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as found:
        order = np.argsort(found["starts"], kind="stable")
        return {name: found[name][order] for name in ("names", "starts", "ends")}


def report(leader: dict[str, np.ndarray], follower: dict[str, np.ndarray]) -> None:
    """All tables."""
    both = [leader, follower]
    for who, kernels in zip(("leader", "follower"), both, strict=True):
        begins = kernels["starts"][kernels["names"] == "_fill"]
        if len(begins) < 3:
            print(f"* {who}: only {len(begins)} steps, {len(kernels['names'])} kernels")
            return
        reached = np.maximum.accumulate(kernels["ends"])[:-1]
        gaps = kernels["starts"][1:] - reached
        short, long = gaps[(gaps > 0) & (gaps < LONG)], gaps[gaps >= LONG]
        steps = len(begins) - 1
        short, long = short.sum() / steps / 1e3, (len(long), long.sum() / steps / 1e3)
        print(
            f"* {who}: {steps} steps, {np.median(np.diff(begins)) / 1e3:.2f} ms each (median),"
            f" {len(kernels['names']) / (steps + 1):.0f} kernels; short gaps {short:.3f} ms a step,"
            f" {long[0]} long ones of {long[1]:.3f} ms a step"
        )
    by_name(both)
    lateness(both)


def by_name(both: list[dict[str, np.ndarray]]) -> None:
    """Milliseconds of a step on each GPU."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for rank, kernels in enumerate(both):
        begins = kernels["starts"][kernels["names"] == "_fill"]
        inside = (kernels["starts"] >= begins[0]) & (kernels["starts"] < begins[-1])
        steps = len(begins) - 1
        for name, start, end in zip(
            *(kernels[key][inside] for key in ("names", "starts", "ends")), strict=True
        ):
            sums[str(name)][rank] += (end - start) / steps
            sums[str(name)][2] += 1 / steps / 2
    print("\n| kernel | a step | leader, us a step | follower |\n|---|---|---|---|")
    for name, (own, theirs, count) in sorted(sums.items(), key=lambda item: -sum(item[1][:2]))[:16]:
        print(f"| {name} | {count:.1f} | {own:.0f} | {theirs:.0f} |")


def lateness(both: list[dict[str, np.ndarray]]) -> None:
    """Of sums, by their place in a step."""
    (starts, ends), (their_starts, their_ends) = map(sums_of, both)
    if min(len(starts), len(their_starts)) < 2 or starts.shape[1] != their_starts.shape[1]:
        print(f"* sums by step and place: {starts.shape} on the leader, {their_starts.shape} on the follower")
        return
    apart = {}  # clocks, by how many steps the follower's first one is before the leader's
    for shift in range(1 - len(their_ends), len(ends)):
        own, theirs = ends[max(shift, 0) :], their_ends[max(-shift, 0) :]
        num = min(len(own), len(theirs))
        apart[shift] = (float(np.median(own[:num] - theirs[:num])), num)
    shift = min((s for s in apart if apart[s][1] > 1), key=lambda s: abs(apart[s][0]))
    offset, num = apart[shift]
    own, theirs = slice(max(shift, 0), max(shift, 0) + num), slice(max(-shift, 0), max(-shift, 0) + num)
    starts, ends = starts[own], ends[own]
    their_starts, their_ends = their_starts[theirs] + offset, their_ends[theirs] + offset
    late = their_starts - starts
    behind = np.maximum(ends, their_ends) - np.maximum(starts, their_starts)
    print(f"\n{num} steps of {starts.shape[1]} sums; clocks {offset:.0f} us apart\n")
    print("| sum of a step | follower later by, us: 10, 50, 90 % | ends behind both | leader's | its |")
    print("|---|---|---|---|---|")
    for first, last in [(0, 1), (1, 2), (2, 10), (10, 40), (40, 63), (63, 64), (64, 200)]:
        part = (slice(None), slice(first, last))
        if late[part].size:
            low, middle, high = np.quantile(late[part], (0.1, 0.5, 0.9))
            rest = (behind[part], (ends - starts)[part], (their_ends - their_starts)[part])
            means = " | ".join(f"{np.mean(found):.1f}" for found in rest)
            print(f"| {first} to {last - 1} | {low:.1f}, {middle:.1f}, {high:.1f} | {means} |", flush=True)


def sums_of(kernels: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends [steps, sums of a step], of steps that were seen whole."""
    is_sum = kernels["names"] == "_sum"
    begins = kernels["starts"][kernels["names"] == "_fill"]
    step = np.searchsorted(begins, kernels["starts"][is_sum], side="right") - 1
    counts = np.bincount(step[step >= 0], minlength=len(begins))
    usual = np.bincount(counts).argmax()
    whole = [n for n in range(len(begins) - 1) if counts[n] == usual]
    found = [np.stack([kernels[key][is_sum][step == n] for n in whole]) for key in ("starts", "ends")]
    return found[0], found[1]


def few_sizes(rows: str) -> None:
    """Graphs of these numbers of rows, and of no others: an engine opens sooner."""
    from hemiola.runtime.step import bucket

    bucket.ROWS = tuple(int(num) for num in rows.split(","))


def main() -> None:
    if sys.argv[1:2] == ["--follower"]:
        folder, rows = sys.argv[2:4]
        del sys.argv[1:]
        few_sizes(rows)
        follow(Path(folder))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="9b")
    parser.add_argument("--rows", default="64")
    parser.add_argument("--drafts", default="none,mtp")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--engines", type=Path, required=True)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--sequences", action="store_true", help="no profile")
    asked = parser.parse_args()
    import gpu_models

    from hemiola.runtime.device import followers
    from hemiola.runtime.device.graphs import Graphs
    from hemiola.runtime.schedule.loop import Loop
    from hemiola.runtime.schedule.outbox import Outbox
    from hemiola.runtime.schedule.scheduler import Scheduler
    from hemiola.runtime.step import ranked
    from hemiola.runtime.step.steps import AllSteps

    for owner, name in ((Scheduler, "plan"), (Scheduler, "commit"), (Outbox, "drain"), (Graphs, "replay")):
        timed(owner, name)
    for owner, name in (
        (ranked.RankedSteps, "launch"),
        (AllSteps, "launch"),
        (Loop, "step"),
        (Loop, "_deliver"),
    ):
        timed(owner, name)
    watch_steps()
    few_sizes(asked.rows)
    rows = [int(num) for num in asked.rows.split(",")]
    prompts = np.random.default_rng(0).integers(0, 100_000, (max(rows), asked.context)).tolist()
    for model in asked.models.split(","):
        engine_dir = gpu_models.made(model, asked.engines, max(rows), asked.context + 1024, asked.tp)
        for drafts in asked.drafts.split(","):
            with tempfile.TemporaryDirectory() as folder:
                kept = asked.keep or Path(folder)
                followers.COMMAND = [sys.executable, __file__, "--follower", folder, asked.rows]
                with gpu_models.opened(model, engine_dir, drafts) as llm:
                    for number, num in enumerate(rows):
                        print(f"\n### {model}, drafts {drafts}, {num} rows\n", flush=True)
                        sequences(llm, prompts[:num])
                        if asked.sequences:
                            continue
                        found = decode(llm, prompts[:num], Path(folder), number)
                        report(*found)
                        if asked.keep:
                            for name, kernels in zip(("leader", "follower"), found, strict=True):
                                np.savez_compressed(kept / f"{model}-{drafts}-{num}-{name}.npz", **kernels)


if __name__ == "__main__":
    main()
