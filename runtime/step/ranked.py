"""The leader's steps: each is sent to the followers, and then done like any other."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.device.host_units import HostUnits, Share
from hemiola.runtime.device.memory import Storage
from hemiola.runtime.device.ranks import Digest, digest_of
from hemiola.runtime.device.transfer import fetch
from hemiola.runtime.schedule.plan import Launched, Opening, Outcome, Plan
from hemiola.runtime.step.record import Move, StepRecord, packed
from hemiola.runtime.step.steps import AllSteps
from hemiola.runtime.step.table import TableSource

CHECKED_EVERY = 16  # steps: all ranks say what their ledgers hold


class Followers(Protocol):
    """The processes that get the records (runtime/device/followers.py)."""

    def send(self, number: int, record: bytes) -> None:
        """Raises RankLost when one is lost."""
        ...

    def move(self, record: bytes) -> None:
        """Raises RankLost when one is lost."""
        ...

    def settled(self) -> Callable[[], None]:
        """A function that waits until they have done all moves so far; raises RankLost when one is lost."""
        ...

    def share(self) -> Share:
        """The leader's part of the host's units."""
        ...

    def landed(self, number: int, digest: Digest | None) -> None:
        """The leader has done a step."""
        ...

    def check(self) -> None:
        """Raises RankLost when one is lost."""
        ...


class Landing(NamedTuple):
    """A step of several GPUs. What they leave where one is lost is no answer: whoever reads it hears of that.

    A kernel that waits for a lost rank ends when the leader knows of the loss."""

    output: Launched
    land: Callable[[], None]  # raises RankLost

    def seconds(self) -> tuple[float, float, float]:
        """See Launched."""
        return self.output.seconds()

    def read(self) -> Outcome:
        """See Launched. Raises RankLost."""
        self.land()
        return self.output.read()


class RankedSteps:
    """A loop's steps and its store."""

    def __init__(
        self, steps: AllSteps, storage: Storage, pages: TableSource, followers: Followers, has_head: bool
    ) -> None:
        pages.keep_changes()
        self.steps, self._storage, self._followers = steps, storage, followers
        self._has_head = has_head
        self._number = 0
        self._openings: list[Opening] = []  # of the next step
        self._restored: dict[int, int] = {}  # by slot, from which one

    def copy_slot(self, source: int, target: int) -> None:
        self._restored[target] = source
        self._storage.copy_slot(source, target)

    def open(self, slot_id: int, ids: np.ndarray, start: int, rule: Rule) -> None:
        """See Steps."""
        self._openings.append(Opening(slot_id, ids, start, self._restored.pop(slot_id, 0), rule))
        self.steps.open(slot_id, ids, start, rule)

    def launch(self, plan: Plan) -> Launched:
        """See Steps. Raises RankLost when a follower is lost."""
        self._number += 1
        is_checked = self._number % CHECKED_EVERY == 0
        changes = self.steps.table.tell()
        ready, fitted = self.steps.ready(plan), self.steps.fit(plan)
        scored = {n: row.scored for n, row in enumerate(plan.rows) if row.scored is not None}
        given = self._openings, ready, fitted, changes, scored, self._has_head, is_checked
        self._openings = []
        self._followers.send(self._number, packed(StepRecord(self._number, *given)))
        launched = self._watched(lambda: self.steps.launch_as(plan, ready, fitted))
        number, digest, ledger = self._number, None, self.steps.ledger
        if is_checked:
            slot_ids = [row.slot_id for row in plan.rows]
            (digest,) = fetch([digest_of(ledger.ids, ledger.lengths, slot_ids)])

        def land() -> None:
            step_digest = None if digest is None else Digest(number, int(digest))
            self._followers.landed(number, step_digest)

        if ledger.device.type != "cpu":
            return Landing(launched, land)
        land()
        return launched

    def _watched(self, run: Callable[[], Launched]) -> Launched:
        """Who waits for a rank that is lost gets an error of the kernel's, and raises the reason instead."""
        try:
            return run()
        except Exception:
            self._followers.check()
            raise


class RankedUnits:
    """The host's units of all ranks. Which ones are used is the leader's to decide; each rank copies its own
    part to them and from them. A file below has all parts together."""

    def __init__(self, units: HostUnits, followers: Followers) -> None:
        self.num_units, self.units_per_slot = units.num_units, units.units_per_slot
        self.unit_bytes, self.get, self.fill = units.unit_bytes, units.get, units.fill
        self.has_come = units.has_come
        self._units, self._followers = units, followers

    def save_pages(self, page_ids: Sequence[int], units: Sequence[int]) -> None:
        self._move(Move("save_pages", (list(page_ids), list(units))))

    def save_slot(self, slot_id: int, units: Sequence[int]) -> None:
        self._move(Move("save_slot", (slot_id, list(units))))

    def load_pages(self, units: Sequence[int], page_ids: Sequence[int]) -> None:
        self._move(Move("load_pages", (list(units), list(page_ids))))

    def load_slot(self, units: Sequence[int], slot_id: int) -> None:
        self._move(Move("load_slot", (list(units), slot_id)))

    def mark(self) -> int:
        """All ranks count alike."""
        return self._move(Move("mark", ()))

    def hold(self, number: int) -> None:
        self._move(Move("hold", (number,)))

    def settled(self) -> Callable[[], None]:
        """A function that waits until all ranks have done what they were asked so far."""
        units_settled, others = self._units.settled(), self._followers.settled()

        def wait() -> None:
            units_settled()
            others()

        return wait

    def _move(self, move: Move) -> Any:
        self._followers.move(packed(move))
        return getattr(self._units, move.method)(*move.args)
