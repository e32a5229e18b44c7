"""How routing and tiers change hits and first tokens, from 1 to 1,000 replicas, without a model.

    PYTHONPATH=. python benchmarks/cluster_simulation.py [--replicas 1,4,16,64,250,1000] [--seeds 1]
        [--policies ENDS;ENDS] [--seconds 240] [--jobs 2] [--out DIR]

Each replica has the real prefix cache, evictor and tier of the host's memory; a Dynamo-like router hears the
real events of the reusable depth (runtime/cache/depth.py). What is modelled: a replica computes one prompt at
a time, first come first served, at the measured speed of Qwen3.5-9B on an H200; rows decode beside that.
Conversations are those of eviction.py's chat (6 turns in the mean, think times of 40 s in the median), and
arrive in proportion to the number of replicas. Prints the table, writes cluster_simulation.json and .png.
"""

import argparse
import heapq
import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from eviction import CHUNK_LEN, MODELS, PAGE_LEN, Author, join, read, step

from hemiola.runtime.cache.depth import Depth
from hemiola.runtime.cache.disk import PATIENCE_S
from hemiola.runtime.cache.eviction import Evictor
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.cache.slots import SlotPool
from hemiola.runtime.cache.tier import Tier
from hemiola.runtime.cache.tree import Chain, Entry

GIB = 1 << 30
COST = MODELS["qwen3.5-9b"]
CACHE_GIB, SLOT_SHARE = 3, 0.4  # of a replica, and how much of it slots have
HOST_GIB, FILE_GIB = 12, 100
PER_SECOND = 0.25  # new conversations for each replica
WARM = 0.3  # of the time, which is not counted
# Measured on an H200 (gpu_models.md, cluster.md).
PROMPT_S = 0.225 / 8000  # a token of a prompt
STEP_S, ROW_S = 5.2e-3, 0.03e-3  # a step that decodes, and what each row adds
BASE_S = 8e-3  # a prompt's first token at the least
HOST_BYTES_S, FILE_BYTES_S = 45e9, 1.4e9
MOST_LEN = 24_576
MAX_ROWS = 8


@dataclass(eq=False)
class Turn:
    """A request."""

    at: float
    session: int
    prompt_len: int
    chain: Chain  # prompt and answer
    is_resent: bool = False  # its replica was killed: the prompt has what was said


def conversations(seed: int, num: int, per_second: float, until: float) -> list[Turn]:
    """As in eviction.py, whatever is cached: arrivals do not depend on the policy."""
    author = Author(seed)
    systems = [author.text(n) for n in (300, 800, 1500, 2500)]
    turns: list[Turn] = []
    start = 0.0
    for session in range(num):
        start += author.random.expovariate(per_second)
        now = start
        context = join(author.random.choices(systems, (8, 4, 2, 1))[0], author.passage(150, 1.0, 20, 8000))
        ids, lens = context, []
        while now < until:
            output = author.passage(250, 0.7, 20, 1500)
            ids = join(context, output)
            lens.append((now, len(context), len(ids)))
            if author.chance(1 / 6) or len(ids) > MOST_LEN - 8000:
                break
            now += 0.5 + STEP_S * len(output) + author.size(40, 1.0, 2, 3600)
            context = join(ids, author.passage(80, 1.0, 5, 4000))
        turns += [Turn(at, session, num, Chain(ids[:end], b"", PAGE_LEN)) for at, num, end in lens]
    return sorted(turns, key=lambda turn: turn.at)


class NoCopies:
    """A Mover of nothing."""

    def __init__(self, num_bytes: int) -> None:
        self.num_units = num_bytes // COST.page_bytes
        self.units_per_slot = -(-COST.slot_bytes // COST.page_bytes)

    def save_pages(self, page_ids: Sequence[int], units: Sequence[int]) -> None: ...

    def save_slot(self, slot_id: int, units: Sequence[int]) -> None: ...

    def load_pages(self, units: Sequence[int], page_ids: Sequence[int]) -> None: ...

    def load_slot(self, units: Sequence[int], slot_id: int) -> None: ...

    def mark(self) -> int:
        return 1

    def has_come(self, number: int) -> bool:
        return True

    def hold(self, number: int) -> None: ...


class File:
    """Stands for a DiskTier: what is asked of it is done at once, and says how long it would have taken."""

    is_on, is_overdue, is_awaited = True, False, False

    def __init__(self, host: Tier) -> None:
        self.tier, self._host = Tier(COST, PAGE_LEN, NoCopies(FILE_GIB * GIB)), host

    def keep(self, entry: Entry) -> None:
        self.tier.keep(entry)

    def collect(self) -> None: ...

    def fetch(self, chain: Chain, known_len: int, start: int) -> float:
        """Seconds. What lets a request start beyond `start` is in the host's memory then, if it pays."""
        last = self.tier.match(chain, known_len, start)
        if last is None:
            return 0.0
        known, missing = self._host.known(last)
        state = self.tier.state_of(last)
        if known is not None and not missing and known.slot_id:
            state = []
        num_units = len(missing) + len(state)
        seconds = num_units * COST.page_bytes / FILE_BYTES_S
        if seconds > PROMPT_S * (last.edge - start) + PATIENCE_S:
            return 0.0
        with self._host.held(known):
            units = self._host.reserve(num_units)
        if units is None:
            return 0.0
        pages = {entry.key: unit for entry, unit in zip(missing, units, strict=False)}
        self._host.adopt(last, pages, units[len(missing) :])
        return seconds


class Index:
    """Who has which page, as the router believes: by key, a bit for each replica."""

    def __init__(self, num_replicas: int) -> None:
        self.masks: dict[bytes, int] = {}
        self._num = num_replicas

    def add(self, key: bytes, replica: int) -> None:
        self.masks[key] = self.masks.get(key, 0) | (1 << replica)

    def remove(self, key: bytes, replica: int) -> None:
        left = self.masks.get(key, 0) & ~(1 << replica)
        if left:
            self.masks[key] = left
        else:
            self.masks.pop(key, None)

    def depths(self, chain: Chain, most: int) -> np.ndarray:
        """Pages of each replica."""
        found = np.zeros(self._num, np.int64)
        alive = 0
        for n in range(most + 1):
            mask = self.masks.get(chain.key(n), 0) if n < most else 0
            left = mask if n == 0 else alive & mask
            if left != alive:
                self._put(found, alive & ~left, n)
                alive = left
            if not alive:
                break
        return found

    def _put(self, found: np.ndarray, mask: int, depth: int) -> None:
        if mask:
            packed = np.frombuffer(mask.to_bytes(-(-self._num // 8), "little"), np.uint8)
            found[np.flatnonzero(np.unpackbits(packed, bitorder="little"))] = depth


class Reusable:
    """Hears of the pages that requests can start behind."""

    def __init__(self, index: Index, replica: int) -> None:
        self._index, self._replica = index, replica

    def stored(self, path: Sequence[Entry]) -> None:
        for entry in path:
            self._index.add(entry.key, self._replica)

    def removed(self, path: Sequence[Entry]) -> None:
        for entry in path:
            self._index.remove(entry.key, self._replica)


class Event(NamedTuple):
    """A turn arrives, or a row has put out the tokens up to stop; without a turn, a replica goes."""

    at: float
    order: int
    turn: Turn | None
    replica: int = -1
    slot_id: int = 0
    stop: int = 0


class Replica:
    def __init__(self, number: int, policy: "Policy", index: Index) -> None:
        num_slots = int(CACHE_GIB * GIB * SLOT_SHARE / COST.slot_bytes)
        num_pages = int(CACHE_GIB * GIB * (1 - SLOT_SHARE) / COST.page_bytes)
        self.pages = PagePool(num_pages, PAGE_LEN, num_slots, MOST_LEN // PAGE_LEN + 2)
        self.slots = SlotPool(num_slots, CHUNK_LEN)
        host = Tier(COST, PAGE_LEN, NoCopies(HOST_GIB * GIB)) if policy.host else None
        self.file = File(host) if policy.file and host is not None else None
        tiers: dict[str, Any] = {"host": host, "disk": self.file}
        self.prefix = PrefixCache(self.pages, self.slots, Evictor(COST, PAGE_LEN), **tiers)
        if policy.route == "reusable depth":
            self.prefix.watch(Depth(Reusable(index, number)))
        elif policy.route == "pages":
            self._tell_pages(number, index)
        self.waiting: list[Turn] = []
        self.running: dict[int, tuple[Turn, int]] = {}  # by slot: and how many of its tokens there are
        self.num_running = 0
        self.free_at = 0.0  # when the prompts so far are computed

    def _tell_pages(self, number: int, index: Index) -> None:
        """Of attention alone, as other engines' events do."""
        tree = self.prefix._tree
        add, remove = tree.add, tree.remove

        def added(parent: Entry, key: bytes, tokens: bytes, page_id: int, step: int) -> Entry:
            index.add(key, number)
            return add(parent, key, tokens, page_id, step)

        def removed(entry: Entry) -> Entry:
            index.remove(entry.key, number)
            return remove(entry)

        tree.add, tree.remove = added, removed

    def start(self, turn: Turn, now: float) -> tuple[int, int, float] | None:
        """Slot, hit and when the first token comes; None: no room."""
        self.prefix.tick()
        host, seconds = self.prefix.host, 0.0
        if self.file is not None:
            found = self.prefix._match(turn.chain, turn.prompt_len).start
            seconds = self.file.fetch(turn.chain, turn.prompt_len, found)
        loaded = host.statistics.loaded_units if host is not None else 0
        start = self.prefix.admit(turn.chain, turn.prompt_len, self.num_running)
        if start is None:
            return None
        self.num_running += 1
        if host is not None:
            loaded = host.statistics.loaded_units - loaded
        read(self.prefix, start.slot_id, start.hit_len, turn.prompt_len, True)
        begun = max(now + seconds + loaded * COST.page_bytes / HOST_BYTES_S, self.free_at)
        self.free_at = begun + PROMPT_S * (turn.prompt_len - start.hit_len)
        return start.slot_id, start.hit_len, self.free_at + BASE_S

    def token_s(self) -> float:
        return STEP_S + ROW_S * self.num_running

    def page_keys(self) -> Iterator[bytes]:
        """Of all pages that it has, in both tiers."""
        yield from self.prefix._tree.entries
        if self.prefix.host is not None:
            yield from self.prefix.host._tree.entries


class Policy(NamedTuple):
    route: str
    host: bool
    scale: int = 4  # what a page to compute counts against a page of load
    file: bool = False
    churn: str = ""  # as many replicas as there are come, and go in this way, in the time

    def __str__(self) -> str:
        words = self.route + (f", scale {self.scale}" if self.route in ("pages", "reusable depth") else "")
        words += ", host memory" * self.host + " and a file" * self.file
        return words + (f", replicas {self.churn}" if self.churn else "")


GOING = DRAINED, KILLED = "come and go", "are killed"
POLICIES = [
    Policy("round robin", False),
    Policy("session hash", False),
    Policy("pages", False),
    Policy("reusable depth", False),
    Policy("round robin", True),
    Policy("session hash", True),
    Policy("reusable depth", True, 1),
    Policy("reusable depth", True),
    Policy("reusable depth", True, 16),
    Policy("reusable depth", True, 64),
    Policy("reusable depth", True, file=True),
    *(Policy(route, True, churn=how) for how in GOING for route in ("session hash", "reusable depth")),
]


@dataclass
class Result:
    replicas: int
    seed: int
    policy: str
    turns: int  # counted
    hit: float  # of the prompts' tokens
    ttft_ms: tuple[float, float, float]  # mean, median, 95 %
    resent: int  # answers that another replica went on with
    gap_ms: tuple[float, float]  # until it did: mean, 95 %
    seconds: float


class Cluster:
    def __init__(self, num: int, policy: Policy) -> None:
        self.policy, self.index = policy, Index(2 * num if policy.churn else num)
        self.replicas = {n: Replica(n, policy, self.index) for n in range(num)}  # and those that drain
        self.alive = np.arange(num)
        self._order, self._events = itertools.count(), []
        self._next, self._next_replica = 0, num
        self._noise = np.random.default_rng(0)
        self.first_s: list[float] = []
        self.hits: list[tuple[int, int]] = []
        self.gaps_s: list[float] = []  # of streams whose replica was killed
        self.loads = np.zeros(2 * num, np.int64)  # pages of requests that run or wait

    def run(self, turns: list[Turn]) -> None:
        """Forgets each turn when it has ended: those of 1,000 replicas have 600 MB."""
        self._events = [Event(turn.at, next(self._order), turn) for turn in turns]
        if self.policy.churn:
            ends = np.linspace(turns[0].at, turns[-1].at, len(self.alive), endpoint=False)
            self._events += [Event(float(at), next(self._order), None) for at in ends]
        turns.clear()
        heapq.heapify(self._events)
        while self._events:
            event = heapq.heappop(self._events)
            if event.turn is None:
                self._replace(event.at)
                continue
            if event.slot_id and event.replica not in self.replicas:
                continue
            if event.slot_id:
                self._decode(event, event.turn)
                replica = event.replica
            else:
                replica = self._route(event.turn)
                self.loads[replica] += event.turn.prompt_len // PAGE_LEN
                self.replicas[replica].waiting.append(event.turn)
            self._admit(replica, event.at)

    def _replace(self, now: float) -> None:
        """One drains, and gets nothing new, or is killed. In its place comes an empty one."""
        place = int(self._noise.integers(len(self.alive)))
        if self.policy.churn == KILLED:
            self._kill(int(self.alive[place]), now)
        self.alive[place] = number = self._next_replica
        self._next_replica += 1
        self.replicas[number] = Replica(number, self.policy, self.index)

    def _kill(self, number: int, now: float) -> None:
        """What it had is sent again at once, answers with what was said of them."""
        replica = self.replicas.pop(number)
        said = [Turn(now, turn.session, done, turn.chain, True) for turn, done in replica.running.values()]
        for turn in (*replica.waiting, *said):
            heapq.heappush(self._events, Event(now, next(self._order), turn))
        for key in replica.page_keys():
            self.index.remove(key, number)

    def _route(self, turn: Turn) -> int:
        num = len(self.alive)
        match self.policy.route:
            case "round robin":
                self._next += 1
                return int(self.alive[self._next % num])
            case "session hash":
                return int(self.alive[zlib.crc32(turn.session.to_bytes(4, "little")) % num])
        num_pages = (turn.prompt_len - 1) // PAGE_LEN
        found = self.index.depths(turn.chain, num_pages)[self.alive]
        cost = self.policy.scale * (num_pages - found) + self.loads[self.alive]
        return int(self.alive[np.argmin(cost + self._noise.random(num) / 2)])

    def _admit(self, number: int, now: float) -> None:
        replica = self.replicas[number]
        while replica.waiting and replica.num_running < MAX_ROWS:
            turn = replica.waiting[0]
            found = replica.start(turn, now)
            if found is None:
                return
            replica.waiting.pop(0)
            slot_id, hit, first = found
            if turn.is_resent:
                self.gaps_s.append(first - turn.at)
            else:
                self.first_s.append(first - turn.at)
                self.hits.append((hit, turn.prompt_len))
            self._expect(first, number, turn, slot_id, turn.prompt_len)

    def _expect(self, now: float, number: int, turn: Turn, slot_id: int, done: int) -> None:
        last = len(turn.chain.ids) - 1
        self.replicas[number].running[slot_id] = turn, done
        stop = min(done // PAGE_LEN * PAGE_LEN + PAGE_LEN, last)
        at = now + self.replicas[number].token_s() * (stop - done)
        heapq.heappush(self._events, Event(at, next(self._order), turn, number, slot_id, stop))

    def _decode(self, event: Event, turn: Turn) -> None:
        """The next page of an answer, or its end; where no page can be had, it is cut short."""
        replica, known_len = self.replicas[event.replica], len(turn.chain.ids)
        fits = replica.prefix.grow(event.slot_id, event.stop + 1)
        if fits:
            step(replica.prefix, event.slot_id, event.stop, known_len, True)
        if fits and event.stop < known_len - 1:
            self._expect(event.at, event.replica, turn, event.slot_id, event.stop)
            return
        replica.prefix.tick()
        replica.prefix.release(event.slot_id, donate=True)
        del replica.running[event.slot_id]
        replica.num_running -= 1
        self.loads[event.replica] -= turn.prompt_len // PAGE_LEN


def simulate(num: int, policy: Policy, seed: int, seconds: float) -> Result:
    begun = time.perf_counter()
    turns = conversations(seed, int(PER_SECOND * num * seconds), PER_SECOND * num, seconds)
    counted = slice(int(len(turns) * WARM), None)
    cluster = Cluster(num, policy)
    cluster.run(turns)
    for replica in list(cluster.replicas.values())[:: max(1, num // 8)]:
        replica.prefix.audit()
    gaps_ms = 1e3 * np.array(cluster.gaps_s or [0.0])
    hit, asked = map(sum, zip(*cluster.hits[counted], strict=True))
    first_ms = 1e3 * np.array(cluster.first_s[counted])
    p50, p95 = np.percentile(first_ms, [50, 95])
    return Result(
        replicas=num,
        seed=seed,
        policy=str(policy),
        turns=len(first_ms),
        hit=hit / asked,
        ttft_ms=(float(first_ms.mean()), float(p50), float(p95)),
        resent=len(cluster.gaps_s),
        gap_ms=(float(gaps_ms.mean()), float(np.percentile(gaps_ms, 95))),
        seconds=time.perf_counter() - begun,
    )


def row(found: Result) -> str:
    mean, p50, p95 = found.ttft_ms
    cells = (found.replicas, found.seed, found.policy, f"{found.turns:,}", f"{found.hit:.1%}")
    times = [f"{ms:.0f}" for ms in (mean, p50, p95)]
    gaps = f"{found.resent} | {found.gap_ms[0]:.0f} | {found.gap_ms[1]:.0f}" if found.resent else "- | - | -"
    return f"| {' | '.join([*map(str, cells), *times])} | {gaps} | {found.seconds:.0f} |"


HEADER = (
    "| replicas | seed | policy | turns | hit tokens | first token, ms: mean | median | 95 % | sent again"
    " | gap, ms: mean | 95 % | in, s |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def plot(found: list[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds: list[tuple[str, Callable[[Result], float]]] = [
        ("tokens of prompts that were cached", lambda one: one.hit),
        ("first token, mean ms", lambda one: one.ttft_ms[0]),
        ("first token, 95 % ms", lambda one: one.ttft_ms[2]),
    ]
    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4))
    for panel, (title, value) in zip(axes, kinds, strict=True):
        for policy in map(str, POLICIES):
            here = sorted((one for one in found if one.policy == policy), key=lambda one: one.replicas)
            if not here:
                continue
            style = "--" if "host" in policy else "-"
            panel.plot(
                [one.replicas for one in here], [value(one) for one in here], style, marker="o", label=policy
            )
        panel.set(title=title, xscale="log", xlabel="replicas")
        panel.set_ylim(0, None)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", default="1,4,16,64,250,1000")
    parser.add_argument("--seconds", type=float, default=240, help="of the clock in the simulation")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--policies", default="", help="those whose names end so, by semicolons")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    sizes, seeds = ([int(num) for num in text.split(",")] for text in (args.replicas, args.seeds))
    policies = [one for one in POLICIES if any(str(one).endswith(end) for end in args.policies.split(";"))]
    print(HEADER)
    found: list[Result] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        asked = itertools.product(sorted(sizes, reverse=True), policies, seeds)
        for done in as_completed([pool.submit(simulate, *one, args.seconds) for one in asked]):
            found.append(done.result())
            print(row(found[-1]), flush=True)
            found.sort(key=lambda one: (one.replicas, [str(p) for p in POLICIES].index(one.policy), one.seed))
            (args.out / "cluster_simulation.json").write_text(
                json.dumps([asdict(one) for one in found], indent=1)
            )
    print("\n".join([HEADER, *map(row, found)]))
    plot(found, args.out / "cluster_simulation.png")


if __name__ == "__main__":
    main()
