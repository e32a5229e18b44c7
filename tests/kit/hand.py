"""Runs a loop by hand: no thread, an audit after every turn."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from kit.demands import later
from kit.fake_session import VOCAB, FakeSession
from kit.router_index import RouterIndex

from hemiola.plugins.rows import live_rows
from hemiola.plugins.step.plan import COLUMNS
from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.cache.depth import Depth
from hemiola.runtime.cache.edges import hit_len
from hemiola.runtime.cache.lease import Start
from hemiola.runtime.cache.tier import Tier
from hemiola.runtime.cache.tree import Chain, Entry
from hemiola.runtime.choose.grammar import Grammar
from hemiola.runtime.device.transfer import upload
from hemiola.runtime.dynamo.events import tenant_of
from hemiola.runtime.schedule.loop import Loop
from hemiola.runtime.schedule.plan import Launched, Outcome, Plan
from hemiola.runtime.schedule.request import Bounds, Request, new_request
from hemiola.runtime.step.pack import pack
from hemiola.runtime.step.program import Batch
from hemiola.runtime.step.steps import AllSteps


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(VOCAB), k=length)


def filled(steps: AllSteps, plan: Plan, has_head: bool) -> Batch:
    """What a step will be given, before it is launched."""
    numbers, sizes = pack(plan.rows, has_head).packed
    table = np.frombuffer(numbers, np.int32).reshape(-1, len(COLUMNS))
    ledger = steps.ledger
    (packed,) = upload(ledger.device, table)
    made = steps.ops.fill(
        packed, steps.table.on_device, ledger.lengths, ledger.ids, sizes.tokens, sizes.lines
    )
    return Batch._make(made)


def root_of(entry: Entry) -> Entry:
    while entry.parent is not None:
        entry = entry.parent
    return entry


class Hand:
    """A loop whose turns the test takes."""

    def __init__(self, loop: Loop, bounds: Bounds) -> None:
        self.loop = loop
        self.bounds = bounds
        self.requests: list[Request] = []
        self.pieces: dict[int, list[Piece]] = {}
        self.final_len: dict[int, int] = {}  # by request: tokens whose state its last step made final
        self._stored: dict[int, int] = {}  # and the last edge at which a step kept a snapshot of it
        self.first_hits: dict[Chain, int] = {}  # where requests began when they first got a slot
        self.router: RouterIndex | None = None  # hears of the cache's changes
        self._looks: dict[int, tuple[Plan, list[Callable[[], None]]]] = {}  # by id of a plan under way
        if (disk := loop.scheduler.prefix.disk) is not None:
            disk.patience_s = math.inf  # how fast a disk was must not matter
        self._watch_hits()
        self._watch_steps()
        if isinstance(loop.storage, FakeSession):
            pages = loop.scheduler.prefix.pages
            loop.storage.may_write = lambda page_id: (
                page_id != 0 and not pages.is_cached(page_id) and pages.refs[page_id] == 1
            )

    def _watch_hits(self) -> None:
        prefix = self.loop.scheduler.prefix
        admit = prefix.admit

        def admit_and_check(
            chain: Chain, known_len: int, spare_pages: int = 0, may_hit: bool = True
        ) -> Start | None:
            may_hit = may_hit and not chain.alone
            expected = self.expected_hit(chain.ids[:known_len].tolist(), chain.salt) if may_hit else 0
            if self.router is not None:
                depth = self.router.depth(chain.ids[:known_len].tolist(), tenant_of(chain.salt))
                assert depth >= expected, "the router knows of less than there is"
            start = admit(chain, known_len, spare_pages, may_hit)
            assert start is None or start.hit_len == expected, f"began at {start.hit_len}, not at {expected}"
            if start is not None:
                self.first_hits.setdefault(chain, start.hit_len)
            return start

        prefix.admit = admit_and_check

    def watch_cache(self) -> None:
        """From now on a router hears of the cache; each audit compares what it believes."""
        prefix = self.loop.scheduler.prefix
        self.router = RouterIndex(prefix.page_len)
        prefix.watch(Depth(self.router))

    def _watch_steps(self) -> None:
        scheduler = self.loop.scheduler
        steps = getattr(self.loop.steps, "steps", self.loop.steps)  # of a leader, its own
        launch, commit = steps.launch_as, scheduler.commit
        has_head = self.loop.config.drafts == "mtp"

        def launch_and_note(plan: Plan, *given: Any) -> Launched:
            found = later(filled(steps, plan, has_head).rows)
            self.look(plan, lambda: self.note(plan, *found()))
            return launch(plan, *given)

        def look_and_commit(plan: Plan, outcome: Outcome) -> None:
            for look in self._looks.pop(id(plan), (plan, []))[1]:
                look()
            commit(plan, outcome)

        steps.launch_as, scheduler.commit = launch_and_note, look_and_commit

    def look(self, plan: Plan, look: Callable[[], None]) -> None:
        """As soon as the step is done: a wait before that would keep steps from being under way together."""
        self._looks.setdefault(id(plan), (plan, []))[1].append(look)

    def note(self, plan: Plan, rows: torch.Tensor) -> None:
        """What a step does with the rows of a plan."""
        for row, known in zip(plan.rows, live_rows(rows, self.loop.config.chunk_len), strict=True):
            self.final_len[row.request.id] = known.end - known.num_drafts
            is_exact = self.loop.config.pipeline_depth == 0  # else the host learns later where a state stands
            if is_exact and row.snapshot_slot:
                assert row.snapshot_edge > known.edge, "a slot is taken for an edge that was passed"
            if known.snapshot_slot:
                self._stored[row.request.id] = known.snapshot_edge

    def kept_edge(self, request_id: int) -> int:
        """The last page edge with a state of the request: where it began, kept a snapshot, or stands."""
        config, start = self.loop.config, self.requests[request_id - 1].hit_len
        own = self.final_len[request_id] // config.chunk_len * config.chunk_len
        return max(start, self._stored.get(request_id, 0), 0 if own % config.page_len else own)

    def expected_hit(self, known: list[int], salt: bytes | None = None) -> int:
        """By the pure function, over what the cache holds now."""
        prefix = self.loop.scheduler.prefix
        cached_len, edges = 0, [] if prefix.hybrid else None
        if not prefix.enabled:
            return 0
        for token_ids, entry in prefix.contents():
            same_tenant = salt is None or root_of(entry).tokens == salt
            if same_tenant and entry.step < prefix.step and known[: entry.edge] == token_ids:
                cached_len = max(cached_len, entry.edge)
                if entry.slot_id and edges is not None:
                    edges.append(entry.edge)
        hit = hit_len(len(known), prefix.page_len, cached_len, edges)
        return max(hit, self._expected_of_host(known, salt))

    def _expected_of_host(self, known: list[int], salt: bytes | None) -> int:
        """What the host keeps serves as well."""
        prefix = self.loop.scheduler.prefix
        if prefix.host is None:
            return 0
        found = [
            entry
            for token_ids, entry, _ in prefix.host.contents()
            if known[: entry.edge] == token_ids and (salt is None or root_of(entry).tokens == salt)
        ]
        edges = [entry.edge for entry in found if entry.slot_id] if prefix.hybrid else None
        longest = max((entry.edge for entry in found), default=0)
        return hit_len(len(known), prefix.page_len, longest, edges)

    def submit(
        self,
        prompt: Sequence[int],
        grammar: Grammar | None = None,
        on_piece: Callable[[Piece], None] = lambda piece: None,
        output_ids: Sequence[int] = (),
        **params: object,
    ) -> int:
        """on_piece: hears of each piece when the hand has kept it. output_ids: of a request that goes on."""
        number, params = len(self.requests) + 1, SamplingParams(**params)
        request = new_request(number, prompt, params, self.bounds, grammar=grammar, output_ids=output_ids)
        self.requests.append(request)
        pieces = self.pieces[request.id] = []

        def keep(piece: Piece) -> None:
            pieces.append(piece)
            on_piece(piece)

        self.loop.submit(request, keep)
        return request.id

    @property
    def idle(self) -> bool:
        return not (self.loop._busy or self.loop.scheduler.fetching or len(self.loop._inbox))

    def turn(self) -> None:
        if not self.idle:  # there the loop would wait for a message
            self.loop.turn()
        self.audit()

    def audit(self) -> None:
        """Ownership; and the content of whatever is cached, where the session keeps tokens."""
        scheduler, session = self.loop.scheduler, self.loop.storage
        self.loop.audit()
        if self.router is not None:
            self.router.check(scheduler.prefix)
        assert self._looks == {} or not self.idle, "nobody looked at a step"
        if not isinstance(session, FakeSession):
            return
        page_len = session.config.page_len
        for token_ids, entry in scheduler.prefix.contents():
            assert session.pages[entry.page_id].tolist() == list(token_ids[-page_len:]), (
                "another page's content"
            )
            if entry.slot_id:
                assert session.states[entry.slot_id] == list(token_ids), f"snapshot {entry.slot_id} is wrong"
        self._audit_host(scheduler.prefix.host, page_len)

    def _audit_host(self, host: Tier | None, page_len: int) -> None:
        """It keeps what its keys say."""
        for token_ids, entry, units in host.contents() if host is not None else ():
            content = host.mover.content
            assert content[entry.page_id] == token_ids[-page_len:], "the host has another page's content"
            assert all(content[unit] == token_ids for unit in units), "the host has another snapshot"

    def run(self, most: int = 10_000) -> None:
        """Until everything has ended."""
        for _ in range(most):
            if self.idle:
                return
            self.turn()
        raise AssertionError(f"still busy after {most} turns")

    def preempt(self, request: Request) -> None:
        """Now, or as soon as no step has it."""
        if request.finish_reason is None:
            self.loop.scheduler._send_away(request)

    def ended(self, request_id: int) -> bool:
        pieces = self.pieces[request_id]
        return bool(pieces) and pieces[-1].finish_reason is not None

    def token_ids(self, request_id: int) -> list[int]:
        return [token_id for piece in self.pieces[request_id] for token_id in piece.token_ids]

    def text(self, request_id: int) -> str:
        return "".join(piece.text for piece in self.pieces[request_id])

    def last(self, request_id: int) -> Piece:
        return self.pieces[request_id][-1]
