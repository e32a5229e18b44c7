"""Passing faults of the hardware: on a real engine, what a row has computed becomes NaN between two steps.

A fault strikes a row's own slot and its last, unfinished page, right before a step that has the row. Nothing
that is cached and proven is struck, so at the end every cached page and snapshot is a plain run's again.
"""

import random
from collections.abc import Iterator

import torch
from kit.engine_hand import EngineHand

from hemiola.runtime.schedule.plan import Plan, Row
from hemiola.runtime.schedule.request import Request


class Faults:
    """Strikes rows of a hand's steps until `stop`, and knows who may read NaN."""

    def __init__(self, hand: EngineHand, dice: random.Random, chance: float) -> None:
        """chance: of a fault, in each step."""
        self._hand, self._dice, self._chance = hand, dice, chance
        self.struck: set[int] = set()  # requests that a fault struck, or that hold what such a one computed
        self.alive: list[Request] = []  # those of them that have not ended
        self._spread = False  # others may still get hold of what they computed
        states = hand.manifest.states
        self._pages = [s.name for s in states if s.kind == "page" and not s.name.startswith("mtp.")]
        self._slots = [s.name for s in states if s.name.endswith(".state")]
        hand.before_step = self._before_step

    def stop(self) -> None:
        self._hand.before_step = lambda plan: None

    @property
    def outstanding(self) -> bool:
        """Whether what is cached may hold NaN: a chunk of a prompt is cached before anybody looks."""
        return self._spread

    def _before_step(self, plan: Plan) -> None:
        if self._spread:
            self._note_readers(plan)
        self.alive = [r for r in self.alive if r.finish_reason is None or r.slot_id]
        self._spread = bool(self.alive)
        opened = {opening.slot_id for opening in plan.openings}
        rows = [r for r in plan.rows if r.slot_id not in opened and r.request.id not in self.struck]
        prompts = [row for row in rows if not row.chooses]  # what they compute nobody looks at yet
        if rows and self._dice.random() < self._chance * (5 if prompts else 1):
            self._strike(self._dice.choice(prompts or rows))

    def _strike(self, row: Row) -> None:
        """Nothing, at a page's edge, where no slot holds anything: all that was computed may be cached."""
        pages, storage = self._hand.loop.scheduler.prefix.pages, self._hand.storage
        index, num_inside = divmod(_computed(row), pages.page_len)
        if num_inside:
            storage.free_pages([int(pages.table[row.slot_id, index])])  # poison
        if num_inside or self._slots:
            storage.free_slots([row.slot_id])
            self._add(row.request)
            self._spread = True

    def _add(self, request: Request) -> None:
        self.struck.add(request.id)
        self.alive.append(request)

    def _note_readers(self, plan: Plan) -> None:
        restored = {opening.slot_id: opening.restore_from for opening in plan.openings}
        running = [r for r in self._hand.loop.scheduler.running if r.id not in self.struck]
        found = [
            (request, part.isnan().any()) for request in running for part in self._held(request, restored)
        ]
        broken = torch.stack([outcome for _, outcome in found]).tolist() if found else []
        for request in {request for (request, _), bad in zip(found, broken, strict=True) if bad}:
            self._add(request)

    def _held(self, request: Request, restored: dict[int, int]) -> Iterator[torch.Tensor]:
        """What a request reads that others may have computed: its cached pages, and its state."""
        scheduler, tensors = self._hand.loop.scheduler, self._hand.storage.tensors
        pages, slot_id = scheduler.prefix.pages, request.slot_id
        own = pages.table[slot_id, : pages.capacity[slot_id] // pages.page_len].tolist()
        for page_id in filter(pages.is_cached, own):
            yield from (_readable(tensors[name][page_id]) for name in self._pages)
        if scheduler.slots.edge[slot_id]:
            yield from (tensors[name][restored.get(slot_id, 0) or slot_id] for name in self._slots)


def _computed(row: Row) -> int:
    """Tokens that steps before this one compute, at most."""
    request = row.request
    most_before = request.most_len - (1 + row.num_drafts) * row.chooses
    return most_before - 1 if most_before > request.start_len else request.planned_len - row.num_tokens


def _readable(page: torch.Tensor) -> torch.Tensor:
    """torch looks for no NaN among numbers of 8 bits."""
    return page.to(torch.float32) if page.itemsize == 1 else page
