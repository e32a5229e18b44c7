"""Who runs in a step, with how many tokens; and what a step's result means for them. Sees no tensor.

There are no phases: a row brings the tokens between its committed_len and its total_len, all or a chunk of
them, and a row that reaches total_len gets a new token. Decode is the case of one token.

Age decides everything. `running` and `waiting` are ordered by arrival and every running request is older than
every waiting one; pages that run out are taken from the youngest. So the oldest request always advances, and
since the cache holds at least one request of max_len (config.resolve), nothing waits for ever.
"""

import itertools
import time
from collections import deque
from dataclasses import dataclass, field

from hemiola.runtime.accept import Verdict
from hemiola.runtime.cache.pages import Pages
from hemiola.runtime.cache.slots import Slots
from hemiola.runtime.config import Resolved
from hemiola.runtime.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: rows[n] brings num_tokens[n] tokens, of which the last num_drafts[n] are drafts."""

    rows: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_drafts: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)  # the rows' committed_len before the step

    def add(self, request: Request, num_tokens: int, num_drafts: int) -> None:
        self.rows.append(request)
        self.num_tokens.append(num_tokens)
        self.num_drafts.append(num_drafts)
        self.committed.append(request.committed_len)


class Scheduler:
    """Owns all requests from `add` until `reap` or `abort`."""

    def __init__(self, config: Resolved, pages: Pages, slots: Slots) -> None:
        self.config = config
        self.pages = pages
        self.slots = slots
        self.waiting: deque[Request] = deque()  # oldest first
        self.running: list[Request] = []  # oldest first; each holds a slot
        self.num_preemptions = 0
        self._ages = itertools.count()

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        assert self.pages.count(len(request.ids)) < self.pages.num_pages, (
            "can never fit: config.resolve was bypassed"
        )
        request.age = next(self._ages)
        self.waiting.append(request)

    def plan(self) -> Plan:
        """The next step: decode rows, then prompts under way, then new requests, within the token budget."""
        plan = Plan()
        budget = self.config.max_step_tokens
        spare = budget - len(self.running)  # for drafts: every running row can have a token first
        capacity = self.pages.capacity
        prompts: list[Request] = []
        for request in self.running:  # may shrink at its young end while we are at the old one
            if request.total_len - request.committed_len > 1:
                prompts.append(request)
                continue
            if request.total_len > capacity[request.slot_id] and not self._make_room(request):
                break
            num_drafts = min(len(request.drafts), spare)
            plan.add(request, 1 + num_drafts, num_drafts)
            budget -= 1 + num_drafts
            spare -= num_drafts
        for request in prompts:
            if budget > 0:
                budget -= self._add_chunk(plan, request, budget)
        while budget > 0 and self._admit():
            budget -= self._add_chunk(plan, self.running[-1], budget)
        assert plan.rows or not self.busy, "nothing can run"
        return plan

    def _add_chunk(self, plan: Plan, request: Request, budget: int) -> int:
        """All of the request's pending tokens, or what the budget allows, up to a chunk edge where it can."""
        start = request.committed_len
        num_tokens = request.total_len - start
        if num_tokens > budget:
            to_edge = (start + budget) // self.config.chunk_len * self.config.chunk_len - start
            num_tokens = to_edge if to_edge > 0 else budget
        plan.add(request, num_tokens, 0)
        return num_tokens

    def _make_room(self, request: Request) -> bool:
        """Pages for all known tokens of a running request, if need be from the youngest, perhaps itself."""
        while not self.pages.grow(request.slot_id, request.total_len):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _admit(self) -> bool:
        """Let the oldest waiting request run, if a slot and pages for all its known tokens are free.

        One page per running request stays free, lest the newcomer be preempted by the next decode step.
        """
        if not self.waiting or len(self.running) == self.config.max_rows:
            return False
        request = self.waiting[0]
        # Prefix reuse (issue 3) finds pages and a snapshot here: committed_len starts at the edge of the hit.
        if self.pages.num_free - self.pages.count(request.total_len) < len(self.running):
            return False
        self.waiting.popleft()
        request.slot_id = self.slots.acquire()
        self.pages.grow(request.slot_id, request.total_len)
        self.running.append(request)
        if not request.metrics.first_scheduled:
            request.metrics.first_scheduled = time.perf_counter()
        return True

    def _preempt(self, request: Request) -> None:
        """Give everything back; later the request computes its prompt and its output so far again."""
        self._release(request)
        self.waiting.appendleft(request)
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.release(request.slot_id)
        self.slots.release(request.slot_id)
        request.slot_id = 0
        request.committed_len = 0
        request.drafts.clear()

    def commit(self, plan: Plan, verdict: Verdict) -> None:
        """Advance the lengths, append the new tokens, and see which requests end."""
        certain_len = []
        steps = zip(plan.rows, plan.num_tokens, plan.num_drafts, verdict.token_ids, strict=True)
        for request, num_tokens, num_drafts, token_ids in steps:
            request.committed_len += num_tokens - num_drafts
            certain_len.append(request.committed_len)
            if request.drafts:
                num_accepted = max(len(token_ids) - 1, 0)
                request.committed_len += num_accepted
                request.metrics.count_drafts(num_drafts, num_accepted)
                request.drafts.clear()
            if token_ids:
                request.append(token_ids)
        for row, logprobs in verdict.logprobs.items():
            plan.rows[row].add_logprobs(logprobs)
        for row, error in verdict.errors.items():
            plan.rows[row].fail(error)
        self.slots.commit([r.slot_id for r in plan.rows], certain_len)

    def draft_room(self, plan: Plan) -> list[int]:
        """How many drafts each row of a committed step may have; the pages for them are there."""
        return [self._room(request) for request in plan.rows]

    def _room(self, request: Request) -> int:
        if request.finish_reason is not None or request.total_len - request.committed_len > 1:
            return 0
        most = min(self.config.num_drafts, len(request.ids) - request.total_len - 1)
        if most > 0:
            self.pages.grow(request.slot_id, request.total_len + most)
        return max(0, min(most, self.pages.capacity[request.slot_id] - request.total_len))

    def reap(self, plan: Plan) -> None:
        """Free what the finished rows held."""
        for request in plan.rows:
            if request.finish_reason is not None:
                self._release(request)

    def abort(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """End a request at any moment between two steps."""
        request.finish_reason = reason
        if request.slot_id:
            self._release(request)
        else:
            self.waiting.remove(request)

    def audit(self) -> None:
        """Pages, slots and requests add up."""
        slot_ids = {request.slot_id for request in self.running}
        assert len(slot_ids) == len(self.running) <= self.config.max_rows, "two requests in one slot"
        self.slots.audit(slot_ids)
        self.pages.audit(slot_ids)
        ages = [request.age for request in (*self.running, *self.waiting)]
        assert ages == sorted(ages), f"a younger request overtook: {ages}"
        for request in self.running:
            assert request.finish_reason is None, f"request {request.id} is finished and runs"
            assert 0 <= request.committed_len < request.total_len <= len(request.ids)
            assert request.committed_len <= self.pages.capacity[request.slot_id]
            num_records = request.committed_len - self.slots.edge[request.slot_id]
            assert 0 <= num_records < self.config.chunk_len + self.config.num_drafts, f"{num_records} records"
        for request in self.waiting:
            assert request.committed_len == 0 and request.slot_id == 0, (
                f"request {request.id} waits and holds"
            )
