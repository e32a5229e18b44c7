"""How many drafts a row may have, so that speculation does not lose.

A draft pays if the tokens it is expected to add cost less time than tokens cost without it. Expected: a draft
stays if all before it did and the trunk agrees, with a chance that is learned per request. Time: a step costs
a constant, something per row, and something per draft; drafting costs a constant and something per pass.
These are fitted to the steps that only decode, with forgetting. Now and then a step takes another number of
drafts than seems best, lest what was learned grow old.
"""

from collections.abc import Sequence

import numpy as np

from hemiola.runtime.request import Request

WINDOWS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
REPLAN = 8  # decode steps for which a choice holds
PROBE = 32  # decode steps between two trials of a neighbour
KEPT = 0.98  # of what was learned, per observation
DOUBT = 4.0  # trials for which a new request is taken to be like all others


class Fit:
    """Seconds as a linear function of a step's features; least squares with forgetting."""

    def __init__(self, guess: Sequence[float]) -> None:
        self._guess = np.array(guess)  # coefficients as shares of a first observation
        self._squares = np.zeros((len(guess), len(guess)))
        self._products = np.zeros(len(guess))
        self._scale = 0.0

    def observe(self, features: Sequence[float], seconds: float) -> None:
        if self._scale == 0.0:
            self._scale = seconds
        known = np.array(features)
        usual = self.coefficients @ known
        seconds = (
            min(seconds, 4 * usual) if usual > 0 else seconds
        )  # the machine was busy with something else
        self._squares = KEPT * self._squares + np.outer(known, known)
        self._products = KEPT * self._products + known * seconds

    @property
    def coefficients(self) -> np.ndarray:
        """None of them negative."""
        guess = self._guess * self._scale
        doubt = np.diag(1.0 + 0.01 * np.diag(self._squares))
        found = np.linalg.solve(self._squares + doubt, self._products + doubt @ guess)
        return np.maximum(found, 0.0)


class Pace:
    """Of one engine. `most`: drafts of a row that it was built for. Not adaptive: all there is room for."""

    def __init__(self, most: int, adaptive: bool) -> None:
        self._adaptive = adaptive and most > 0
        self._windows = np.array([k for k in WINDOWS if k < most] + [most])
        self._steps = Fit([0.7, 0.1, 0.05])  # 1, rows, drafts
        self._passes = Fit([0.1, 0.1])  # 1, passes
        self._hits = self._trials = 1.0  # of all requests: hopeful
        self._turn = 0
        self._best = most

    def judged(self, request: Request, num_planned: int, num_accepted: int) -> None:
        """A window of so many drafts was verified; drafts that were not there count as wrong."""
        trials = num_accepted + (num_accepted < num_planned)
        request.draft_trials = KEPT * request.draft_trials + trials
        request.draft_hits = KEPT * request.draft_hits + num_accepted
        self._trials = KEPT * self._trials + trials
        self._hits = KEPT * self._hits + num_accepted

    def timed(self, num_rows: int, num_drafts: int, num_passes: int, step: float, drafting: float) -> None:
        """Seconds of a step that only decoded, and of proposing what comes next."""
        self._steps.observe((1, num_rows, num_drafts), step)
        self._passes.observe((1, num_passes), drafting)

    def choose(self, requests: Sequence[Request], most: Sequence[int]) -> list[int]:
        """Drafts to propose for each row that will decode next; at most most[n]."""
        if not self._adaptive or not any(most):
            return list(most)
        rates, room = self._rates(requests), np.array(most)
        self._turn += 1
        start, per_row, per_draft = self._steps.coefficients
        drafting, per_pass = self._passes.coefficients
        if self._turn % REPLAN == 1 or self._turn < REPLAN:
            windows = np.minimum(room, self._windows[:, None])  # [windows, rows]
            tokens = len(room) + _gain(rates, windows).sum(1)
            seconds = start + per_row * len(room) + per_draft * windows.sum(1)
            seconds = np.maximum(seconds + drafting + per_pass * windows.max(1), 1e-9)
            self._best = int(np.argmax(tokens / seconds))
            self._speed = tokens[self._best] / seconds[self._best]
        window = int(self._windows[self._try()])
        # the last draft of a row must be worth the time that it takes
        worth = min(self._speed * (per_draft + per_pass / len(room)), 1.0)
        own = np.floor(np.log(max(worth, 1e-6)) / np.log(rates))
        own = np.where(own < 1, int(self._is_probe), own)
        return np.minimum(np.minimum(room, window), own).astype(int).tolist()

    @property
    def _is_probe(self) -> bool:
        return self._turn % PROBE == 0 or self._turn <= 4

    def _try(self) -> int:
        """The best window, or for once another: at first all and none, later a neighbour."""
        if self._turn <= 4:
            return len(self._windows) - 1 if self._turn % 2 else 0
        if not self._is_probe:
            return self._best
        step = 1 if self._turn // PROBE % 2 else -1
        if not 0 <= self._best + step < len(self._windows):
            step = -step
        return self._best + step

    def _rates(self, requests: Sequence[Request]) -> np.ndarray:
        """The chance that a request's draft stays, if all before it did."""
        usual = self._hits / self._trials
        counts = np.array([(r.draft_hits, r.draft_trials) for r in requests])
        return np.clip((counts[:, 0] + DOUBT * usual) / (counts[:, 1] + DOUBT), 0.01, 0.99)


def _gain(rates: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Drafts of a window that are expected to stay."""
    return rates * (1 - rates**windows) / (1 - rates)
