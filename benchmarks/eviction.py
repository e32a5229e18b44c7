"""Replays chat and agent traces on the real prefix cache, without a model, and compares eviction policies.

    PYTHONPATH=. python benchmarks/eviction.py [--models NAME ...] [--seeds 1 2] [--gib 3 6 12 24] [--out DIR]

Every policy gets the same bytes and is shown at its own best split between slots and pages. Saved work is the
share of all prefill work (a cost per token and one per pair of tokens) that hits made unnecessary. Prints the
table, writes eviction.json and eviction.png to DIR.
"""

import argparse
import heapq
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hemiola.runtime.cache.eviction import Cost, Evictor, Victim
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.cache.slots import SlotPool
from hemiola.runtime.cache.tree import Entry

GIB = 1 << 30
PAGE_LEN, CHUNK_LEN, MAX_ROWS, STEP_TOKENS = 64, 16, 32, 8192
SPLITS = (0.2, 0.35, 0.5, 0.7, 0.85)  # share of the bytes that goes to slots

# Bytes of a page and a slot. Work per token: 1; per pair of tokens: attention's flops (4 * heads * head_dim *
# layers) over twice the active parameters.
MODELS = {
    "qwen3.5-9b": Cost(PAGE_LEN * 32768, int(49.1 * 2**20), 1.0, 4 * 16 * 256 * 8 / 17.9e9),
    "nemotron-3-nano-30b": Cost(PAGE_LEN * 6144, int(46.8 * 2**20), 1.0, 4 * 32 * 128 * 6 / 6.4e9),
    "attention-only": Cost(PAGE_LEN * 32768, 0, 1.0, 4 * 16 * 256 * 8 / 17.9e9),
}


# Traces.


@dataclass(eq=False)
class Job:
    """A request."""

    at: float  # seconds
    prompt: np.ndarray
    output: np.ndarray

    @property
    def seconds(self) -> float:
        """That it takes, whatever is cached: arrivals must not depend on the policy."""
        return 0.5 + 0.02 * len(self.output)


class Author:
    """Random texts and sizes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._ids = np.random.default_rng(seed)

    def text(self, num_tokens: int) -> np.ndarray:
        return self._ids.integers(0, 150_000, num_tokens, dtype=np.int32)

    def size(self, median: float, sigma: float, least: int, most: int) -> int:
        return int(min(max(self.random.lognormvariate(np.log(median), sigma), least), most))

    def passage(self, median: float, sigma: float, least: int, most: int) -> np.ndarray:
        return self.text(self.size(median, sigma, least, most))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability


def join(*texts: np.ndarray) -> np.ndarray:
    return np.concatenate(texts)


def chat(seed: int, num_sessions: int = 300, per_second: float = 0.35) -> list[Job]:
    """Sessions of 6 turns on average under one of four system prompts; 5 % of answers are asked for again."""
    author = Author(seed)
    systems = [author.text(n) for n in (300, 800, 1500, 2500)]
    jobs: list[Job] = []
    start = 0.0
    for _ in range(num_sessions):
        start += author.random.expovariate(per_second)
        now = start
        system = author.random.choices(systems, (8, 4, 2, 1))[0]
        context = join(system, author.passage(150, 1.0, 20, 8000))
        while True:
            job = Job(now, context, author.passage(250, 0.7, 20, 1500))
            jobs.append(job)
            if author.chance(1 / 6) or len(context) > 30_000:
                break
            now += job.seconds
            if author.chance(0.05):
                now += author.size(10, 0.8, 1, 600)
                continue
            now += author.size(40, 1.0, 2, 3600)
            context = join(context, job.output, author.passage(80, 1.0, 5, 4000))
    return jobs


class Agents:
    """Tasks of three applications with long system prompts. A task calls tools (9 on average); now and then
    it asks again, goes back and takes another way, starts sub-agents, or forks with all its context."""

    def __init__(self, seed: int) -> None:
        self.author = Author(seed + 1000)
        sizes = ((6000, 2500), (9000, 3000), (12000, 4000))
        self.applications = [(self.author.text(main), self.author.text(sub)) for main, sub in sizes]
        self.jobs: list[Job] = []

    def run(self, num_tasks: int = 120, per_second: float = 0.12) -> list[Job]:
        now = 0.0
        for _ in range(num_tasks):
            now += self.author.random.expovariate(per_second)
            main, sub = self.author.random.choices(self.applications, (5, 3, 1))[0]
            self._task(now, join(main, self.author.passage(500, 0.8, 50, 4000)), sub, 9, 0)
        return self.jobs

    def _task(self, now: float, context: np.ndarray, sub: np.ndarray, mean: int, depth: int) -> float:
        """Returns when it ends."""
        author = self.author
        earlier: list[np.ndarray] = []
        while True:
            job = Job(now, context, author.passage(120, 0.8, 20, 1200))
            self.jobs.append(job)
            now += job.seconds
            if author.chance(1 / mean) or len(context) > 60_000:
                return now
            event = author.random.random()
            if event < 0.06:  # the same again
                now += author.size(3, 0.8, 1, 60)
                continue
            if event < 0.14 and earlier:  # another way from an earlier point
                back = author.random.randrange(max(0, len(earlier) - 4), len(earlier))
                context = join(earlier[back], author.passage(150, 0.8, 20, 1000))
                del earlier[back:]
                now += author.size(5, 1.0, 1, 300)
                continue
            earlier.append(context)
            context = join(context, job.output)
            if depth < 2 and event < 0.24:
                now = self._delegate(now, context, sub, depth + 1)
            context = join(context, author.passage(500, 1.1, 30, 8000))
            now += author.size(5, 1.0, 1, 300)

    def _delegate(self, now: float, context: np.ndarray, sub: np.ndarray, depth: int) -> float:
        author = self.author
        if author.chance(0.5):
            count, mean = author.random.randint(1, 3), 4
            starts = [join(sub, author.passage(400, 0.6, 50, 1500)) for _ in range(count)]
        else:
            count, mean = author.random.randint(2, 4), 3
            starts = [join(context, author.passage(100, 0.6, 20, 500)) for _ in range(count)]
        return max(self._task(now + 0.1 * n, start, sub, mean, depth) for n, start in enumerate(starts))


def search(seed: int, num_tasks: int = 60, per_second: float = 0.05) -> list[Job]:
    """Tree search: four answers to each surviving context, each answer judged, two contexts survive."""
    author = Author(seed + 3000)
    systems = [author.text(n) for n in (3000, 5000)]
    jobs: list[Job] = []
    start = 0.0
    for _ in range(num_tasks):
        start += author.random.expovariate(per_second)
        now = start
        beam = [join(author.random.choice(systems), author.passage(800, 0.7, 100, 4000))]
        for _ in range(author.size(5, 0.4, 2, 9)):
            grown: list[np.ndarray] = []
            end = now
            for context in [context for context in beam for _ in range(4)]:
                job = Job(now + author.random.random(), context, author.passage(200, 0.6, 30, 1000))
                jobs.append(job)
                grown.append(join(context, job.output))
                end = max(end, job.at + job.seconds)
            for branch in grown:
                jobs.append(Job(end + author.random.random(), join(branch, author.text(60)), author.text(20)))
            now = end + author.size(4, 0.7, 1, 60)
            survivors = author.random.sample(grown, 2)
            beam = [join(branch, author.passage(150, 0.8, 20, 2000)) for branch in survivors]
    return jobs


def noise(seed: int, count: int, until: float) -> list[Job]:
    """Prompts that nobody repeats."""
    author = Author(seed + 2000)
    jobs: list[Job] = []
    for _ in range(count):
        prompt, output = author.passage(2000, 1.0, 50, 24_000), author.passage(200, 0.7, 20, 1500)
        jobs.append(Job(author.random.random() * until, prompt, output))
    return jobs


BRANCHING = ("agents", "search", "mixed")
TRACES = ("chat", *BRANCHING)


def make_trace(name: str, seed: int) -> list[Job]:
    match name:
        case "chat":
            jobs, share = chat(seed), 0.15
        case "agents":
            jobs, share = Agents(seed).run(), 0.2
        case "search":
            jobs, share = search(seed), 0.2
        case "mixed":
            jobs, share = chat(seed, 150, 0.18) + Agents(seed).run(70, 0.07), 0.3
        case _:
            sys.exit(f"error: there is no trace {name!r}; choose from {', '.join(TRACES)}")
    until = sorted(job.at for job in jobs)[int(len(jobs) * 0.97)]
    return sorted(jobs + noise(seed, int(len(jobs) * share), until), key=lambda job: job.at)


# Policies.


class Lru(Evictor):
    """Two lists, one of snapshots and one of pages with nothing behind them: the least recently used goes."""

    def snapshot_victim(self, step: int) -> Victim | None:
        free = [entry for entry in self.snapshots.entries if entry.pinned != step]
        return Victim(min(free, key=lambda entry: entry.used), 0.0) if free else None

    def page_victim(self) -> Entry | None:
        return self.tails.first()

    def idle(self, entry: Entry) -> None:
        self.tails.add(entry)


class Policy(NamedTuple):
    evictor: Callable[[Cost, int], Evictor]
    interval: int = 0


POLICIES = {"ours": Policy(Evictor), "lru": Policy(Lru), "every page": Policy(Lru, PAGE_LEN)}


# Replay.


def read(prefix: PrefixCache, slot_id: int, start: int, prompt_len: int, chose: bool = False) -> None:
    """Compute a prompt from `start` on. chose: its first token is no NaN, so others may run from it."""
    at = start
    while at < prompt_len:
        edge = prefix.slots.edge[slot_id]
        at = prefix.chunk_end(slot_id, edge, min(at + STEP_TOKENS, prompt_len))
        step(prefix, slot_id, at, prompt_len + 1, chose and at == prompt_len)


def step(prefix: PrefixCache, slot_id: int, stop: int, known_len: int, chose: bool = False) -> None:
    """Compute a request's tokens up to `stop`."""
    edge = stop // CHUNK_LEN * CHUNK_LEN
    take = prefix.take(slot_id, prefix.slots.edge[slot_id], edge)
    prefix.slots.commit(slot_id, stop)
    prefix.commit(slot_id, stop, known_len, take.edge if take else 0, chose)
    prefix.tick()


@dataclass
class Result:
    """One trace through one cache."""

    trace: str
    seed: int
    policy: str
    gib: float
    split: float
    num_pages: int
    num_slots: int
    saved: float  # of the prefill work
    hit: float  # of the prompt tokens
    most_waiting: int
    seconds: float
    statistics: dict[str, int]


class Event(NamedTuple):
    """A request arrives (slot_id 0), or has put out the tokens up to stop."""

    at: float
    order: int
    job: Job
    slot_id: int = 0
    stop: int = 0


class Replay:
    """A request is admitted when there is room, and holds its pages and its slot while it runs. Its prompt
    is computed at once; its output grows page by page, beside that of others."""

    def __init__(self, cost: Cost, num_pages: int, num_slots: int, table_width: int, policy: Policy) -> None:
        self.cost = cost
        self.pages = PagePool(num_pages, PAGE_LEN, num_slots, table_width)
        self.slots = SlotPool(num_slots, CHUNK_LEN)
        self.evictor = policy.evictor(cost, PAGE_LEN)
        self.prefix = PrefixCache(self.pages, self.slots, self.evictor, interval=policy.interval)
        self.saved = self.total = 0.0
        self.most_waiting = 0
        self._num_running = 0
        self._waiting: list[Job] = []
        self._events: list[Event] = []
        self._order = itertools.count()

    def run(self, jobs: list[Job]) -> None:
        self._events = [Event(job.at, next(self._order), job) for job in jobs]
        while self._events:
            event = heapq.heappop(self._events)
            if event.slot_id:
                self._decode(event)
            else:
                self._waiting.append(event.job)
            while self._waiting and self._num_running < MAX_ROWS and self._start(self._waiting[0], event.at):
                self._waiting.pop(0)
            self.most_waiting = max(self.most_waiting, len(self._waiting))
        assert not self._waiting and not self._num_running
        self.prefix.audit()

    def _start(self, job: Job, now: float) -> bool:
        self.prefix.tick()
        prompt_len = len(job.prompt)
        chain = self.prefix.chain(join(job.prompt, job.output))
        start = self.prefix.admit(chain, prompt_len, self._num_running)
        if start is None:
            return False
        self._num_running += 1
        self.saved += self.cost.work(start.hit_len)
        self.total += self.cost.work(prompt_len)
        read(self.prefix, start.slot_id, start.hit_len, prompt_len)
        self._expect(job, now + 0.5, start.slot_id, prompt_len)
        return True

    def _expect(self, job: Job, now: float, slot_id: int, done: int) -> None:
        """The next page of output, or its end, whose last token is not computed."""
        last = len(job.prompt) + len(job.output) - 1
        stop = min(done // PAGE_LEN * PAGE_LEN + PAGE_LEN, last)
        heapq.heappush(self._events, Event(now + 0.02 * (stop - done), next(self._order), job, slot_id, stop))

    def _decode(self, event: Event) -> None:
        """Where no page can be had, the output is cut short."""
        known_len = len(event.job.prompt) + len(event.job.output)
        fits = self.prefix.grow(event.slot_id, event.stop + 1)
        if fits:
            step(self.prefix, event.slot_id, event.stop, known_len)
        if fits and event.stop < known_len - 1:
            self._expect(event.job, event.at, event.slot_id, event.stop)
            return
        self.prefix.tick()
        self.prefix.release(event.slot_id)
        self._num_running -= 1


def replay(
    trace: str, seed: int, jobs: list[Job], name: str, cost: Cost, gib: float, split: float
) -> Result | None:
    """None if the pages are too few."""
    longest = max(len(job.prompt) + len(job.output) for job in jobs) // PAGE_LEN + 2
    num_slots = max(int(gib * GIB * split / cost.slot_bytes) if cost.slot_bytes else 0, MAX_ROWS + 1)
    num_pages = int((gib * GIB - num_slots * cost.slot_bytes) / cost.page_bytes)
    if num_pages < longest + MAX_ROWS:
        return None
    run = Replay(cost, num_pages, num_slots, longest, POLICIES[name])
    start = time.perf_counter()
    run.run(jobs)
    return Result(
        trace=trace,
        seed=seed,
        policy=name,
        gib=gib,
        split=split,
        num_pages=num_pages,
        num_slots=num_slots,
        saved=run.saved / run.total,
        hit=run.prefix.statistics.hit_tokens / run.prefix.statistics.query_tokens,
        most_waiting=run.most_waiting,
        seconds=time.perf_counter() - start,
        statistics=asdict(run.prefix.statistics),
    )


def best(trace: str, seed: int, jobs: list[Job], name: str, cost: Cost, gib: float) -> Result | None:
    """At the split that saves most."""
    shares = SPLITS if cost.slot_bytes else (0.0,)
    if cost.slot_bytes and name == "every page":
        shares = (cost.slot_bytes / (cost.slot_bytes + cost.page_bytes),)
    results = [replay(trace, seed, jobs, name, cost, gib, share) for share in shares]
    return max((result for result in results if result is not None), key=lambda r: r.saved, default=None)


@dataclass
class Line:
    """All policies on one trace at one size; None: too small for one request beside those that run."""

    model: str
    trace: str
    seed: int
    gib: float
    bound: float  # with endless memory
    results: dict[str, Result | None]

    @property
    def ratio(self) -> float | None:
        ours, lru = self.results["ours"], self.results["lru"]
        return ours.saved / lru.saved if ours is not None and lru is not None else None


def measure(model: str, seeds: list[int], sizes: list[float]) -> list[Line]:
    cost = MODELS[model]
    lines: list[Line] = []
    for trace in TRACES:
        for seed in seeds:
            jobs = make_trace(trace, seed)
            endless = replay(trace, seed, jobs, "ours", cost, 4000.0, 0.5 if cost.slot_bytes else 0.0)
            assert endless is not None and not endless.statistics["evicted_pages"]
            for gib in sizes:
                results = {name: best(trace, seed, jobs, name, cost, gib) for name in POLICIES}
                lines.append(Line(model, trace, seed, gib, endless.saved, results))
                print(row(lines[-1]), flush=True)
    return lines


HEADER = (
    "| model | trace | seed | GiB | endless | every page | lru (split) | ours (split) | ours / lru |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def row(line: Line) -> str:
    def cell(name: str) -> str:
        result = line.results[name]
        return f"{result.saved:.3f} ({result.split:.2f})" if result is not None else "-"

    ratio = f"{line.ratio:.2f}" if line.ratio is not None else "-"
    cells = (cell("every page").split()[0], cell("lru"), cell("ours"), ratio)
    head = (line.model, line.trace, str(line.seed), f"{line.gib:g}", f"{line.bound:.3f}")
    return f"| {' | '.join((*head, *cells))} |"


def plot(lines: list[Line], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(line.model for line in lines))
    figure, axes = pyplot.subplots(len(models), len(TRACES), figsize=(14, 3.2 * len(models)), squeeze=False)
    for model, panels in zip(models, axes, strict=True):
        for trace, panel in zip(TRACES, panels, strict=True):
            here = [line for line in lines if (line.model, line.trace) == (model, trace)]
            for name in POLICIES:
                found = [(line.gib, line.results[name]) for line in here]
                sizes = sorted({gib for gib, result in found if result is not None})
                means = [
                    np.mean([result.saved for gib, result in found if gib == size and result is not None])
                    for size in sizes
                ]
                panel.plot(sizes, means, marker="o", label=name)
            panel.axhline(
                float(np.mean([line.bound for line in here])), color="grey", ls=":", label="endless"
            )
            panel.set(title=f"{model}, {trace}", xscale="log", xlabel="GiB", ylabel="saved prefill work")
            panel.set_ylim(0, 1)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["qwen3.5-9b", "nemotron-3-nano-30b"], choices=list(MODELS)
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--gib", nargs="+", type=float, default=[3, 6, 12, 24])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    print(f"seeds {args.seeds}, pages of {PAGE_LEN} tokens, at most {MAX_ROWS} requests at once")
    print(HEADER)
    lines = [line for model in args.models for line in measure(model, args.seeds, args.gib)]
    (args.out / "eviction.json").write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    plot(lines, args.out / "eviction.png")
    ratios = sorted(line.ratio for line in lines if line.trace in BRANCHING and line.ratio is not None)
    print(
        f"ours / lru on branching traces: {ratios[0]:.2f} to {ratios[-1]:.2f}, median {np.median(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
