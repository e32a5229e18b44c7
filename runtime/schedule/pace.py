"""How many drafts a row may have, so that speculation does not lose.

A draft pays if the tokens that it is expected to add take less time than tokens take without it. Tokens: a
draft stays if all before it did and the trunk agrees; the chance of that is learned for each request. Time: a
step costs a constant, something per row, and something per draft; drafting costs a constant and something per
pass. These are fitted to steps that only decode, and old steps are forgotten slowly.

To keep learning, a step now and then takes a neighbour of the window that seems best. The time that such a
trial may lose is saved up first, as a small share of all time: trials are rare where drafts are dear, and
frequent where they are cheap. While no draft stays, each trial waits twice as long as the last. No window is
more than twice as long as what stayed of one.
"""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hemiola.runtime.schedule.request import Request

WINDOWS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
REPLAN = 8  # decode steps for which a choice holds
PAUSE, LONGEST_PAUSE = 8, 128  # decode steps between two trials: once a draft stayed, and at most
SHARE = 0.006  # of the time, for trials
CREDIT = 0.5  # steps' time that trials may lose before anything was saved
KEPT = 0.98  # of what was learned, per observation
DOUBT = 8.0  # trials for which a new request is taken to be like all others
MARGIN = 0.99  # of the best speed is enough for a shorter window


class LinearFit:
    """Seconds as a linear function of a step's features; recursive least squares with forgetting.

    What is known of a feature is forgotten only by steps that have it: while nobody drafts, the price of a
    draft stays known.
    """

    def __init__(self, guess: Sequence[float]) -> None:
        self._weights = list(guess)  # at first as shares of a first observation
        self._known = [[0.05 * (i == j) for j in range(len(guess))] for i in range(len(guess))]
        self.scale = 0.0

    def begin(self, seen: Sequence[float], seconds: float) -> None:
        """The guess gets its unit: so long is what was seen, if its shares are right."""
        self.scale = seconds / max(sum(map(operator.mul, self._weights, seen)), 1e-9)
        self._weights = [share * self.scale for share in self._weights]

    def observe(self, seen: Sequence[float], seconds: float) -> None:
        usual = sum(map(operator.mul, self._weights, seen))
        if usual > 0:
            seconds = min(seconds, 2 * usual)  # the machine was busy with something else
        for i, line in enumerate(self._known):
            for j in range(len(line)):
                kept = (KEPT**0.5 if seen[i] > 0 else 1.0) * (KEPT**0.5 if seen[j] > 0 else 1.0)
                line[j] = line[j] * kept + seen[i] * seen[j]
        moved = _solved(self._known, [x * (seconds - usual) for x in seen])
        self._weights = [a + b for a, b in zip(self._weights, moved, strict=True)]

    @property
    def coefficients(self) -> list[float]:
        """What each feature costs in seconds; never negative."""
        return [max(cost, 0.0) * (self.scale > 0) for cost in self._weights]


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """x of matrix x = right: two or three equations, for which numpy takes longer than Python.

    The matrix is symmetric, and its diagonal is made larger by a millionth, lest it is singular."""
    size = len(right)
    lines = [[*line, known] for line, known in zip(matrix, right, strict=True)]
    for i in range(size):
        lines[i][i] += 1e-6 * lines[i][i]
    for i in range(size):
        for j in range(i + 1, size):
            share = lines[j][i] / lines[i][i]
            for k in range(i, size + 1):
                lines[j][k] -= share * lines[i][k]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(lines[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (lines[i][size] - rest) / lines[i][i]
    return solution


class Pace:
    """Says how many drafts pay. `most`: drafts of a row. If not adaptive, as many as there is room for."""

    def __init__(self, max_drafts: int, adaptive: bool) -> None:
        self.adaptive = adaptive and max_drafts > 0  # else there is nothing to learn
        self._windows = [k for k in WINDOWS if k < max_drafts] + [max_drafts]
        self._steps = LinearFit([0.7, 0.1, 0.05])  # 1, rows, drafts
        self._passes = LinearFit([0.02, 0.1])  # 1, passes: shares of a step, for at first there may be none
        self._hits = self._trials = 1.0  # of all requests: hopeful
        self._turn = self._last_trial = self._best = 0
        self._pause = 2 * PAUSE
        self._longest = 0  # of what stayed
        self._speed = 0.0  # tokens per second, with the best window
        self._credit = 0.0  # seconds that trials may lose
        self._regrets = [0.0] * len(self._windows)  # what a step with each window loses, in seconds

    def judged(self, request: Request, num_planned: int, num_accepted: int) -> None:
        """A window of so many drafts was verified; drafts that were not there count as wrong."""
        trials = num_accepted + (num_accepted < num_planned)
        request.draft_trials = KEPT * request.draft_trials + trials
        request.draft_hits = KEPT * request.draft_hits + num_accepted
        self._trials = KEPT * self._trials + trials
        self._hits = KEPT * self._hits + num_accepted
        if num_accepted:
            self._longest = max(self._longest, num_accepted)
            self._pause = PAUSE

    def timed(self, num_rows: int, num_drafts: int, num_passes: int, step: float, drafting: float) -> None:
        """Seconds of a step that only decoded, and of proposing what comes next."""
        if step <= 0:
            return  # a clock that saw nothing
        if self._steps.scale == 0.0:
            self._credit = CREDIT * (step + drafting)
            self._steps.begin((1, num_rows, num_drafts), step)
            self._passes.begin((50, 0), step)
        self._credit = min(self._credit + SHARE * (step + drafting), 4 * CREDIT * (step + drafting))
        self._steps.observe((1, num_rows, num_drafts), step)
        self._passes.observe((1, num_passes), drafting)

    def choose(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> list[int]:
        """Drafts to propose for each row that will decode next; at most most[n]."""
        if not self.adaptive or not any(max_drafts):
            return list(max_drafts)
        self._turn += 1
        if self._steps.scale == 0.0:  # nothing was timed yet
            is_hopeless = self._longest == 0 and self._trials > DOUBT
            return [0 if is_hopeless else min(room, self._turn % 2) for room in max_drafts]
        rates = self._rates(requests)
        cost = self._costs(len(max_drafts))
        if self._turn % REPLAN == 1 or self._turn < 2 * REPLAN:
            self._replan(np.array(rates), np.array(max_drafts), cost)
        at, is_trial = self._try()
        window = self._windows[at]
        if window == 0:
            return [0] * len(max_drafts)
        # the last draft of a row must be worth the time that it takes
        worth = math.log(min(max(self._speed * cost.last_draft, 1e-6), 1.0))
        worthwhile = [int(worth / math.log(rate)) or int(is_trial) for rate in rates]
        return [min(room, window, best) for room, best in zip(max_drafts, worthwhile, strict=True)]

    def _costs(self, num_rows: int) -> "_Cost":
        start, per_row, per_draft = self._steps.coefficients
        drafting, per_pass = self._passes.coefficients
        return _Cost(
            start + per_row * num_rows + drafting, per_draft, per_pass, per_draft + per_pass / num_rows
        )

    def _replan(self, rates: np.ndarray, room: np.ndarray, cost: "_Cost") -> None:
        """The window that gives most tokens per second, among those not too far from what was tried."""
        longest = np.array(self._windows)
        windows = np.minimum(room, longest[:, None])  # [windows, rows]
        tokens = len(room) + _gain(rates, windows).sum(1)
        seconds = cost.plain + cost.per_draft * windows.sum(1) + cost.per_pass * windows.max(1)
        speeds = tokens / np.maximum(seconds, 1e-9)
        speeds = np.where(longest <= max(2 * self._longest, 1), speeds, 0.0)
        self._best = int(np.argmax(speeds >= MARGIN * speeds.max()))
        self._speed = float(speeds[self._best])
        self._regrets = np.maximum(seconds - tokens / self._speed, 0.0).tolist()

    def _try(self) -> tuple[int, bool]:
        """The best window; or another, if it is time and what that may lose has been saved."""
        if self._turn - self._last_trial < self._pause:
            return self._best, False
        step = 1 if self._best == 0 or self._turn // PAUSE % 2 else -1
        at = self._best + step
        if at == len(self._windows):
            at = self._best - 1
        if self._regrets[at] > self._credit:
            return self._best, False
        self._credit -= self._regrets[at]
        self._last_trial = self._turn
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return at, True

    def _rates(self, requests: Sequence[Request]) -> list[float]:
        """The chance that a request's draft stays, if all before it did."""
        usual = DOUBT * self._hits / self._trials
        chances = [(r.draft_hits + usual) / (r.draft_trials + DOUBT) for r in requests]
        return [min(max(chance, 0.01), 0.99) for chance in chances]


class _Cost(NamedTuple):
    """What the next step costs, in seconds, with the rows that there are."""

    plain: float  # of a step without drafts
    per_draft: float
    per_pass: float
    last_draft: float  # of one row's, its share of a pass included


def _gain(rates: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Drafts of a window that are expected to stay."""
    return rates * (1 - rates**windows) / (1 - rates)
