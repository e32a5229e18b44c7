"""How many drafts, on simulated costs: speculation never loses, and where it pays it takes what there is.

A simulated request accepts each draft with a given chance, if all before it were accepted; no clock is read.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from kit.fake_session import hashed
from kit.proposers import Scripted, Text, always_right

from hemiola.runtime.api import Metrics, SamplingParams
from hemiola.runtime.schedule import loop
from hemiola.runtime.schedule.pace import LONGEST_PAUSE, PAUSE, REPLAN, Pace
from hemiola.runtime.schedule.request import Request

STEPS = 500


@dataclass(frozen=True)
class Costs:
    """Of a step, in units of a step of one row without drafts."""

    step: float = 0.9
    row: float = 0.1
    draft: float = 0.1
    drafting: float = 0.0
    a_pass: float = 0.0

    def __call__(self, num_rows: int, num_drafts: int) -> float:
        return self.step + self.row * num_rows + self.draft * num_drafts


CHEAP = Costs(0.9, 0.1, 0.02, 0.0, 0.02)  # verification is nearly free: a GPU that waits for memory
LINEAR = Costs(0.0, 1.0, 1.0)  # a step's time is that of its tokens: a busy GPU, or a CPU
COSTLY = Costs(0.9, 0.1, 0.1, 0.1, 0.5)  # every draft takes half a step to find
GPU_1, GPU_64 = Costs(1.0, 0.0, 0.012, 0.0, 0.12), Costs(1.0, 0.0, 0.003, 0.0, 0.19)  # of 9B, rows
COSTS = {"cheap": CHEAP, "linear": LINEAR, "costly": COSTLY}


def requests(count: int) -> list[Request]:
    params = SamplingParams()
    return [Request(n, params, 0, frozenset(), [], 0, 0, Metrics(0, 0.0)) for n in range(count)]


class Simulation:
    """Decode steps of some requests; what they are granted is verified in the next step."""

    def __init__(
        self, pace: Pace, count: int, most: int | Sequence[int], costs: Costs, busy: float = 0.0
    ) -> None:
        self.pace, self.costs, self.busy = pace, costs, busy
        self.requests = requests(count)
        self.most = [most] * count if isinstance(most, int) else list(most)
        self.granted = [0] * count
        self.totals = [0] * count
        self.dice = random.Random(0)

    def run(self, num_steps: int, chance: float | Sequence[float]) -> float:
        """Tokens per time."""
        chances = [chance] * len(self.requests) if isinstance(chance, float) else chance
        seconds, tokens = 0.0, 0
        for _ in range(num_steps):
            windows, self.granted = self.granted, self.pace.choose(self.requests, self.most)
            assert all(0 <= own <= most for own, most in zip(self.granted, self.most, strict=True))
            num_rows, num_passes = len(windows), max(self.granted)
            step = self.costs(num_rows, sum(windows))
            drafting = self.costs.drafting + self.costs.a_pass * num_passes
            noise = self.dice.lognormvariate(0, 0.05) * (5 if self.dice.random() < self.busy else 1)
            self.pace.timed(num_rows, sum(windows), num_passes, 1e-3 * step * noise, 1e-3 * drafting * noise)
            seconds += step + drafting
            for n, request in enumerate(self.requests):
                kept = 0
                while kept < windows[n] and self.dice.random() < chances[n]:
                    kept += 1
                if windows[n]:
                    self.pace.judged(request, windows[n], kept)
                tokens += 1 + kept
                self.totals[n] += windows[n]
        return tokens / seconds


def speed_of(num_drafts: int, count: int, chance: float, costs: Costs) -> float:
    """Expected, with always so many drafts."""
    tokens = count * sum(chance**n for n in range(num_drafts + 1))
    passes = costs.drafting + costs.a_pass * num_drafts
    return tokens / (costs(count, count * num_drafts) + passes)


def best_speed(most: int, count: int, chance: float, costs: Costs) -> float:
    return max(speed_of(k, count, chance, costs) for k in range(most + 1))


@pytest.mark.parametrize("most", [1, 3, 16, 64])
@pytest.mark.parametrize("count", [1, 8, 64])
@pytest.mark.parametrize(("costs", "chance"), [("linear", 0.05), ("linear", 0.6), ("costly", 0.05)])
def test_speculation_that_does_not_pay_is_not_used(costs: str, chance: float, count: int, most: int) -> None:
    """At most 3 % slower than no drafts over the first 500 steps, all trials included."""
    speed = Simulation(Pace(most, True), count, most, COSTS[costs]).run(STEPS, chance)
    assert speed >= 0.97 * speed_of(0, count, chance, COSTS[costs])


@pytest.mark.parametrize("most", [1, 3, 16, 64])
@pytest.mark.parametrize("count", [1, 8, 64])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_speculation_that_pays_is_used(chance: float, count: int, most: int) -> None:
    """At least 95 % of the best fixed number's speed, the first 100 steps aside."""
    simulation = Simulation(Pace(most, True), count, most, CHEAP)
    simulation.run(100, chance)
    speed = sum(simulation.run(STEPS, chance) for _ in range(3)) / 3
    assert speed >= 0.95 * best_speed(most, count, chance, CHEAP)


@pytest.mark.parametrize("most", [1, 3, 64])
@pytest.mark.parametrize(("costs", "count"), [(GPU_1, 1), (GPU_64, 64)], ids=["1 row", "64 rows"])
def test_a_head_that_is_never_right_is_soon_left_alone(costs: Costs, count: int, most: int) -> None:
    """At most 3 % slower than no drafts over the first 48 steps; no window is longer than one."""
    simulation, longest, seconds = Simulation(Pace(most, True), count, most, costs), 0, 0.0
    for _ in range(48):
        seconds += count / simulation.run(1, 0.0)
        longest = max(longest, *simulation.granted)
    assert longest == 1
    assert 48 * count / seconds >= 0.97 * speed_of(0, count, 0.0, costs)


@pytest.mark.parametrize("most", [1, 3, 64])
@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("costs", [CHEAP, LINEAR, COSTLY, GPU_1], ids=["cheap", "linear", "costly", "gpu"])
def test_a_head_that_is_never_right_costs_nothing_in_the_long_run(
    costs: Costs, count: int, most: int
) -> None:
    """At most 1 % behind the first 200 steps."""
    simulation = Simulation(Pace(most, True), count, most, costs)
    simulation.run(200, 0.0)
    assert simulation.run(800, 0.0) >= 0.99 * speed_of(0, count, 0.0, costs)


def test_what_a_pass_costs_is_believed_at_once() -> None:
    """Behind steps without one nearly nothing was drafting: a pass is not some other process's work."""
    pace = Pace(3, True)
    for num_drafts, num_passes in ((0, 0), (0, 0), (0, 1), (1, 1), (1, 0)):
        pace.timed(1, num_drafts, num_passes, 4.65e-3, 1e-5 + 0.45e-3 * num_passes)
    assert pace._passes.coefficients == pytest.approx([1e-5, 0.45e-3], rel=0.1, abs=2e-5)


def test_a_head_whose_drafts_never_stayed_in_prompts_steps_is_not_tried_at_once() -> None:
    """Steps with prompts are not timed, but their drafts are judged."""
    pace, few = Pace(3, True), requests(2)
    assert pace.choose(few, [3, 3]) == [1, 1]
    for _ in range(5):
        for request in few:
            pace.judged(request, 1, 0)
    assert [pace.choose(few, [3, 3]) for _ in range(4)] == [[0, 0]] * 4
    pace.judged(few[0], 1, 1)
    assert [1, 1] in [pace.choose(few, [3, 3]) for _ in range(2)]


def test_a_bad_request_in_a_good_batch_gets_fewer_drafts() -> None:
    simulation = Simulation(Pace(8, True), 8, 8, CHEAP)
    simulation.run(STEPS, [0.05] + [0.9] * 7)
    bad, *good = simulation.totals
    assert bad < 0.5 * min(good) and min(good) > 2 * STEPS


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("chances", [(0.05, 0.9), (0.9, 0.05), (0.3, 0.8)], ids=str)
def test_a_change_is_seen_within_200_steps(chances: tuple[float, float], count: int) -> None:
    simulation = Simulation(Pace(8, True), count, 8, Costs(0.9, 0.1, 0.05, 0.0, 0.05))
    simulation.run(STEPS, chances[0])
    simulation.run(200, chances[1])
    speed = sum(simulation.run(STEPS, chances[1]) for _ in range(3)) / 3
    assert speed >= 0.93 * best_speed(8, count, chances[1], simulation.costs)


@pytest.mark.parametrize("chance", [0.05, 0.5, 0.9])
def test_a_machine_that_is_busy_with_other_things_is_seen_through(chance: float) -> None:
    """A tenth of all steps seem to take five times as long."""
    simulation = Simulation(Pace(3, True), 8, 3, CHEAP, busy=0.1)
    speed = sum(simulation.run(STEPS, chance) for _ in range(3)) / 3
    assert speed >= 0.92 * best_speed(3, 8, chance, CHEAP)


def test_a_request_keeps_to_its_own_limit() -> None:
    simulation = Simulation(Pace(8, True), 4, [0, 1, 3, 8], CHEAP)
    simulation.run(STEPS, 0.9)
    totals = simulation.totals
    assert totals[0] == 0 and 0 < totals[1] <= STEPS < totals[2] <= 3 * STEPS < totals[3]


def test_without_adaption_every_row_gets_all_there_is_room_for() -> None:
    assert Pace(8, False).choose(requests(3), [8, 0, 5]) == [8, 0, 5]


# What the loop tells it.


@dataclass
class Told:
    """A pace that writes down what it hears, and always grants all there is room for."""

    judged: list[tuple[int, int, int]]  # request, drafts planned, drafts kept
    timed: list[tuple[float, ...]]

    def listen(self, pace: Pace) -> None:
        pace.choose = lambda requests, most: list(most)
        pace.judged = lambda request, *counts: self.judged.append((request.id, *counts))
        pace.timed = lambda *step: self.timed.append(step)


@pytest.mark.parametrize("depth", [0, 1])
def test_it_hears_of_every_window_and_of_steps_that_only_decode(
    make_hand: Callable, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Two of the first request's three drafts are right; the second has two drafts only, and both are."""
    now = [0.0]
    clock = SimpleNamespace(**dict.fromkeys(("perf_counter", "thread_time", "monotonic"), lambda: now[0]))
    monkeypatch.setattr(loop, "time", clock)
    right = always_right(hashed)

    def script(request: Text, room: int) -> list[int]:
        ids = right.script(request, room)
        return [*ids[:2], ids[2] + 1] if request.id == 1 else ids[:2]

    hand = make_hand(proposer=Scripted(script), num_drafts=3, adaptive_drafts=True, pipeline_depth=depth)
    hand.loop.storage.before_run = lambda batch: now.append(now.pop() + 3.0)  # seconds
    ops = hand.loop.steps.ops
    ops.mark = lambda times, place: times.__setitem__(place, int(now[0] * 1e9))
    ops.tell = lambda *given: now.append(now.pop() + 4.0)
    told = Told([], [])
    told.listen(hand.loop.scheduler.pace)
    for length in (4, 5):
        hand.submit(list(range(length)), max_tokens=30)
    for _ in range(4 + depth):
        hand.turn()
    planned = 3 if depth else 2  # that there are fewer is known too late
    assert told.judged[:4] == [(1, 3, 2), (2, planned, 2)] * 2
    assert told.timed[:2] == [(2, 3 + planned, 3, 3.0, 4.0)] * 2
    assert len(told.timed) == 3, "the first step read prompts"
    first, second = (request.metrics for request in hand.requests)
    assert (first.accepted, second.drafted, second.accepted) == ([3, 3, 0], [3, 3], [3, 3])


def test_a_first_step_of_no_time_made_drafts_free_for_ever() -> None:
    pace = Pace(3, adaptive=True)
    pace.timed(1, 0, 0, 0.0, 0.0)
    pace.timed(1, 0, 0, 1.0, 0.0)
    assert pace._costs(1).per_draft > 0 and pace._costs(1).per_pass > 0


def test_trials_of_drafts_come_back_after_pauses_that_double_up_to_a_limit() -> None:
    """However long no draft stayed; and one that stays makes trials frequent again."""
    simulation = Simulation(Pace(3, True), 1, 3, CHEAP)
    turns: list[int] = []
    for turn in range(3000):
        simulation.run(1, 0.0)
        turns += [turn] if any(simulation.granted) else []
    pauses = [after - before for before, after in itertools.pairwise(turns)]
    settled = pauses[-5:]
    assert len(settled) == 5 and all(LONGEST_PAUSE <= pause <= LONGEST_PAUSE + REPLAN for pause in settled)
    assert all(later >= pause for pause, later in itertools.pairwise(pauses[-12:]))
    simulation.run(2 * LONGEST_PAUSE, 0.95)
    before = sum(simulation.totals)
    simulation.run(100, 0.95)
    assert sum(simulation.totals) - before > 200, "drafts are used again"


def test_a_draft_that_stays_ends_the_long_pauses_between_trials() -> None:
    simulation = Simulation(Pace(3, True), 1, 3, CHEAP)
    simulation.run(2000, 0.0)
    pace, (request,) = simulation.pace, simulation.requests
    pace.judged(request, 1, 0)
    assert pace._pause == LONGEST_PAUSE, "a draft that fell"
    pace.judged(request, 1, 1)
    assert pace._pause == PAUSE
