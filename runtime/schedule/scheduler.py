"""Who runs in a step, with how many tokens; and what a step's outcome means for them. Sees no tensor.

There are no phases: a row brings the tokens behind those committed, all that are known or a chunk of them,
and a row that reaches the end of its text chooses a token. Decoding is the case of one token and some drafts.

A step is planned before the outcome of the last ones is known. Prompts are planned exactly. What a decoding
row has become is bounded: at least its total_len, at most its most_len. Pages are taken for the most, a row
that may have reached its limit, or that follows a grammar, waits for the outcome, and what a request holds is
freed when no step that has it as a row is under way. Nothing is undone.

A request that starts from the host's memory holds its slot and pages while they are filled, and steps go on
without it. If there is nothing else to do, its step is launched and waits on the device.

Rank, (priority, age), decides everything. `running` and `waiting` are in order of rank; pages that run out
are taken from the last. So the first request always advances, and since the cache holds at least one request
of max_len (config.resolve), nothing of the best priority waits for ever. For each aging_s seconds in which a
request waits, its priority improves by one, up to the best of all requests, and it keeps what it has gained.
So every request comes to the best priority, where only older ones precede it.

A step's tokens go to known tokens before they go to guesses: first a token of every decoding row,
then prompts, then drafts. But a prompt leaves up to half of what the decoding rows left to drafts of the same
or a better priority; otherwise drafting would stop whenever many prompts come.
"""

import bisect
import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from operator import attrgetter

from hemiola.runtime.api import Logprob
from hemiola.runtime.cache.lease import Start
from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.config import Resolved
from hemiola.runtime.schedule.audit import audit
from hemiola.runtime.schedule.pace import Pace
from hemiola.runtime.schedule.plan import Opening, Outcome, Plan, Row, Scored
from hemiola.runtime.schedule.request import Request

RANK = attrgetter("rank")
AGING_LOOKS = 8  # per aging_s: a look goes through all requests that wait


class Scheduler:
    """Owns all requests from `add` until `reap` or `abort`."""

    def __init__(self, config: Resolved, prefix: PrefixCache, pace: Pace) -> None:
        self.config = config
        self.prefix = prefix
        self.slots = prefix.slots
        self.pace = pace
        self.waiting: list[Request] = []  # best rank first
        self.running: list[Request] = []  # best rank first; each holds a slot
        self.fetching: list[Request] = []  # a file is read for them; they wait behind that
        self.num_preemptions = 0
        self._anew: list[Request] = []  # since the last reap
        self.clock = time.monotonic  # of waiting
        self._ages = itertools.count()
        self._next_look = 0.0  # when priorities are raised again

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        pages = self.prefix.pages
        assert pages.count(len(request.ids)) < pages.num_pages, "can never fit: config.resolve was bypassed"
        request.age = next(self._ages)
        request.chain = self.prefix.chain(request.ids, request.params.cache_salt)
        request.waiting_since = self.clock()
        done = partial(self._fetched, request)
        if not request.num_unscored and self.prefix.fetch(request.chain, request.total_len, done):
            self.fetching.append(request)
        else:
            bisect.insort(self.waiting, request, key=RANK)

    def _fetched(self, request: Request) -> None:
        """What it may start from is in memory now, or cannot be had."""
        if request in self.fetching:  # else it has been cancelled
            self.fetching.remove(request)
            bisect.insort(self.waiting, request, key=RANK)

    # Before a step.

    def plan(self) -> Plan:
        """The next step: decode rows, then prompts under way and new requests by rank, then drafts.

        Empty if everything waits for the outcome of steps under way.
        """
        self.prefix.tick()
        self._raise_priorities()
        plan = Plan(step=self.prefix.step)
        prompts = self._add_decodes(plan)
        self._add_drafts(plan, self._add_prompts(plan, prompts))
        self._grant_drafts(plan)
        self._take_snapshots(plan)
        return plan

    def _raise_priorities(self) -> None:
        """Of requests that have waited; only here, since ranks may not change while a step is planned."""
        limit, now = self.config.aging_s, self.clock()
        if limit == 0 or now < self._next_look:
            return
        self._next_look = now + limit / AGING_LOOKS
        best = min((r.priority for r in (*self.running[:1], *self.waiting[:1])), default=0)
        for request in self.waiting:
            gained = int(min((now - request.waiting_since) / limit, 2**32))
            request.priority = max(best, request.priority - gained)
            request.waiting_since += gained * limit
        self.waiting.sort(key=RANK)

    def _add_decodes(self, plan: Plan) -> list[Request]:
        """A token of every row whose prompt has been read; the others are returned."""
        capacity = self.prefix.pages.capacity
        prompts: list[Request] = []
        for request in list(self.running):
            if request.slot_id == 0 or request.finish_reason is not None or request.leaving:
                continue  # preempted by one before it; or it is on its way out
            most_len = request.total_len + request.ahead
            if request.planned_len < request.start_len:
                prompts.append(request)
            elif most_len >= len(request.ids) or (request.ahead and request.guide is not None):
                continue  # it waits for an outcome
            elif most_len < capacity[request.slot_id] or self._make_room(request, most_len + 1):
                self._add_decode(plan, request, most_len)
        return [request for request in prompts if request.slot_id]

    def _add_decode(self, plan: Plan, request: Request, most_len: int) -> None:
        known, max_edge = request.edge, self._edge(most_len)
        if request.ahead:  # of the page edges it may pass, the next is the surest
            max_edge = min(max_edge, known - known % self.config.page_len + self.config.page_len)
        plan.rows.append(Row(request, request.slot_id, 1, 0, True, request.owed, (known, max_edge)))
        request.ahead += 1
        request.in_flight += 1

    def _add_prompts(self, plan: Plan, prompts: list[Request]) -> int:
        """Chunks of prompts under way and of new requests; returns how many tokens the step has left."""
        spare = left = self.config.max_step_tokens - len(plan.rows)
        if not prompts and not self.waiting:
            return left
        drafting = [row.request for row in plan.rows if row.request.num_drafts]
        under_way, blocked = deque(prompts), False
        coming: list[Request] = []
        while (request := self._next(under_way, blocked)) is not None:
            drafts = sum(r.num_drafts for r in drafting if r.priority <= request.priority)
            budget = left - min(drafts, spare // 2)
            if request.slot_id == 0:
                blocked = not self._admit(plan, request, budget)
            if budget > 0 and request.slot_id and not request.leaving:
                if request.load and not self.prefix.has_come(request.load):
                    coming.append(request)
                else:
                    left -= self._add_chunk(plan, request, budget)
        if coming and not plan.rows and not any(request.in_flight for request in self.running):
            for request in [one for one in coming if one.slot_id]:
                left -= self._add_chunk(plan, request, left) if left else 0
        return left

    def _next(self, prompts: deque[Request], blocked: bool) -> Request | None:
        """The best of the prompts under way (removed from them) and, unless blocked, of those that wait."""
        while prompts and prompts[0].slot_id == 0:
            prompts.popleft()  # an admission has preempted it, so it waits
        waits = self.waiting[0] if self.waiting and not blocked else None
        if waits is not None and (not prompts or waits.rank < prompts[0].rank):
            return waits
        return prompts.popleft() if prompts else None

    def _add_drafts(self, plan: Plan, left: int) -> None:
        """Add the drafts that were proposed, as far as tokens and pages are left."""
        if self.config.num_drafts == 0:
            return
        capacity = self.prefix.pages.capacity
        for row in plan.rows:
            request = row.request
            num_drafts = min(request.num_drafts, left)
            if num_drafts and not self.prefix.grow(row.slot_id, request.most_len + num_drafts):
                num_drafts = min(num_drafts, int(capacity[row.slot_id]) - request.most_len)
            row.num_tokens += num_drafts
            row.num_drafts = num_drafts
            request.ahead += num_drafts
            left -= num_drafts

    def _add_chunk(self, plan: Plan, request: Request, budget: int) -> int:
        """All of the request's pending tokens, or what the budget allows, up to a chunk edge where it can."""
        if request.load:
            self._hold(request)
            self._open(plan, request, restore_from=0)
        start, end = request.planned_len, request.start_len
        if end - start > budget:
            to_edge = self._edge(start + budget)
            end = to_edge if to_edge > start else start + budget
        end = self.prefix.chunk_end(request.slot_id, self._edge(start), end)
        chooses = end == request.start_len
        owed = int(start > 0 and start == request.hit_len)
        edges = self._edge(start), self._edge(end)
        row = Row(request, request.slot_id, end - start, 0, chooses, owed, edges)
        row.scored = _scored(request, start, end)
        plan.rows.append(row)
        request.planned_len = end
        request.edge = edges[1]
        request.ahead += chooses
        request.in_flight += 1
        return end - start

    def _edge(self, num_tokens: int) -> int:
        return num_tokens // self.config.chunk_len * self.config.chunk_len

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Get pages for so many tokens of a running request; the last of rank gives its own, if need be."""
        while not self.prefix.grow(request.slot_id, num_tokens):
            if any(r.leaving or r.finish_reason is not None for r in self.running):
                return False  # their pages will do, or it is tried again
            last = self.running[-1]
            self._send_away(last)
            if last.leaving or last is request:
                return False
        return True

    def _admit(self, plan: Plan, request: Request, budget: int) -> bool:
        """Let the first waiting request run, if a slot and pages for all its known tokens can be had.

        One page per running request stays free, lest the newcomer be preempted by the next decode step.
        A request of better priority than the last one that runs takes its place.
        """
        if budget <= 0 and len(self.running) < self.config.max_rows:
            return False
        while (start := self._start(request)) is None:
            if not self._give_way(request) or budget <= 0:
                return False
        self.waiting.remove(request)
        request.waited = self.clock() - request.waiting_since
        request.slot_id = start.slot_id
        request.committed_len = request.planned_len = request.hit_len = start.hit_len
        request.edge = start.hit_len
        request.start_len = request.total_len
        request.load = start.load
        if not start.load:
            self._open(plan, request, start.restore_from)
        bisect.insort(self.running, request, key=RANK)
        if not request.metrics.first_scheduled:
            request.metrics.first_scheduled = time.perf_counter()
            request.metrics.cached_tokens = start.hit_len
        return True

    def _open(self, plan: Plan, request: Request, restore_from: int) -> None:
        """Its first step is in this plan."""
        known = request.ids[: request.start_len]
        plan.openings.append(Opening(request.slot_id, known, request.hit_len, restore_from, request.rule))

    def _hold(self, request: Request) -> None:
        """Steps from now on run behind what comes for it."""
        self.prefix.hold(request.load)
        request.load = 0

    def _start(self, request: Request) -> Start | None:
        if len(self.running) == self.config.max_rows:
            return None
        may_hit = not request.num_unscored  # tokens behind a hit are not computed, so they have no scores
        return self.prefix.admit(request.chain, request.total_len, len(self.running), may_hit)

    def _give_way(self, request: Request) -> bool:
        """One of worse priority than a request that waits makes place for it; whether it has."""
        last = self.running[-1] if self.running else request
        if last.priority <= request.priority or last.leaving or last.finish_reason is not None:
            return False
        self._send_away(last)
        return not last.leaving

    def _send_away(self, request: Request) -> None:
        """Preempt it, now or when the steps that have it are done."""
        if request.in_flight:
            request.leaving = True
        else:
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        """Give slot and pages back; later it begins at the last snapshot of its text that is left."""
        if request.starts_anew:
            request.prompt_logprobs.clear()  # not before: with a first token of this step they have left
        self._release(request, donate=True)
        request.waiting_since = self.clock() - request.waited
        bisect.insort(self.waiting, request, key=RANK)
        request.metrics.num_preemptions += 1
        self.num_preemptions += 1

    def _release(self, request: Request, donate: bool) -> None:
        assert request.in_flight == 0, f"request {request.id} is in a step under way"
        if request.load:
            self._hold(request)  # others may get what it holds
        self.running.remove(request)
        self.prefix.release(request.slot_id, donate)
        request.slot_id = 0
        request.committed_len = request.planned_len = request.edge = 0
        request.num_drafts = request.owed = 0
        request.leaving = request.starts_anew = False

    def _grant_drafts(self, plan: Plan) -> None:
        """How many drafts may be proposed for the next step of each row; the pages for them are there."""
        if self.config.num_drafts == 0:
            return
        rows = [row for row in plan.rows if row.chooses]
        max_drafts = [self._max_drafts(row.request) for row in rows]
        for row, room in zip(rows, self.pace.choose([r.request for r in rows], max_drafts), strict=True):
            request = row.request
            if room and self.prefix.grow(request.slot_id, request.most_len + room):
                row.room = room
            request.num_drafts = row.room
        self._let_wait(rows)

    def _let_wait(self, rows: list[Row]) -> None:
        """Pairs that a drafting head may read later are read later; together, lest some are in every step."""
        waiting = [row for row in rows if self._can_wait(row)]
        some_read = len(waiting) < len(rows) and all(row.num_tokens == 1 for row in rows)
        for row in waiting:
            row.reads = some_read and row.owed + 1 >= self.config.chunk_len // 2
        for row in rows:
            row.request.owed = 0 if row.reads else row.owed + row.num_tokens

    def _can_wait(self, row: Row) -> bool:
        """Nobody drafts behind them, there is room for more, and no page is finished that others may find."""
        page_len = self.config.page_len
        finishes = self.prefix.enabled and row.edges[0] // page_len != row.edges[1] // page_len
        return row.room == 0 and row.num_tokens == 1 and row.owed + 1 < self.config.chunk_len and not finishes

    def _max_drafts(self, request: Request) -> int:
        asked = request.params.num_drafts
        max_drafts = self.config.num_drafts if asked is None else min(asked, self.config.num_drafts)
        return max(0, min(max_drafts, len(request.ids) - request.most_len - 1))

    def _take_snapshots(self, plan: Plan) -> None:
        """Ask for snapshots at edges that rows will pass, or may pass."""
        for row in plan.rows:
            start, end = row.edges
            if start != end and (take := self.prefix.take(row.slot_id, start, end)) is not None:
                row.snapshot_slot, row.snapshot_edge = take

    # After a step.

    def commit(self, plan: Plan, outcome: Outcome) -> None:
        """Advance the lengths, append the new tokens, publish what is final; see which requests end."""
        page_len, slots, broken = self.config.page_len, self.slots, outcome.broken
        for n, row in enumerate(plan.rows):
            request, slot_id, num_drafts = row.request, row.slot_id, row.num_drafts
            request.in_flight -= 1
            old_len = request.committed_len
            new_len = old_len + row.num_tokens - num_drafts
            start, edge = slots.edge[slot_id], slots.commit(slot_id, new_len)
            if request.edge < edge:
                request.edge = edge
            if row.chooses:
                request.ahead -= 1 + num_drafts
                if num_drafts:
                    new_len += _num_accepted(outcome, n)
            request.committed_len = new_len
            is_broken, broken_at = n in broken, 0
            if row.scored is not None:
                broken_at = _broken_score(row.scored, outcome.prompt_logprobs.get(n, ()))
            if is_broken or broken_at:
                self._distrust(slot_id)
            if request.finish_reason is not None or request.starts_anew:
                continue  # since this step was planned
            if broken_at:  # a later start might skip what is scored, and never see it again
                request.fail(f"the engine computed NaN for the token at position {broken_at}")
                continue
            if row.scored is not None and n in outcome.prompt_logprobs:
                request.add_prompt_logprobs(row.scored.position, outcome.prompt_logprobs[n])
            if row.chooses:
                self._append(request, outcome, n, num_drafts)
            if is_broken and request.finish_reason is None:
                request.fail(f"the engine computed NaN for the token at position {request.total_len}")
                continue
            if start != edge or old_len // page_len != new_len // page_len or old_len < request.start_len:
                known_len, took = request.total_len, row.snapshot_edge
                self.prefix.commit(slot_id, new_len, known_len, took, row.chooses, plan.step)

    def _distrust(self, slot_id: int) -> None:
        """A request computed NaN: nothing of its prefix stays cached; who shares it starts anew, alone."""
        affected = self.prefix.withdraw(slot_id)
        for request in [one for one in self.running if one.slot_id in affected]:
            if request.finish_reason is None:
                request.starts_anew = request.leaving = request.chain.alone = True
                self._anew.append(request)  # reap sends it away: it may still end in this step

    def _append(self, request: Request, outcome: Outcome, n: int, num_planned: int) -> None:
        token_ids = outcome.token_ids[n]
        if num_planned:
            num_accepted = _num_accepted(outcome, n)
            request.metrics.count_drafts(outcome.num_judged[n], num_accepted)
            if self.pace.adaptive:
                self.pace.judged(request, num_planned, num_accepted)
        if request.in_flight == 0:
            request.num_drafts = outcome.num_drafts[n]
        request.append(token_ids)
        if n in outcome.logprobs:
            request.add_logprobs(outcome.logprobs[n])

    def reap(self, plan: Plan) -> None:
        """Free what rows held that have ended, or must leave, and are in no step under way."""
        anew, self._anew = self._anew, []
        for request in (*(row.request for row in plan.rows), *anew):
            if request.slot_id == 0 or request.in_flight:
                continue
            if request.finish_reason is not None:
                self._release(request, donate=request.finish_reason != "error")
                self.prefix.forget_unproven(request.chain, request.total_len)
            elif request.leaving:
                self._preempt(request)

    def abort(self, request: Request) -> None:
        """End a request at any moment between two steps."""
        request.finish_reason = "cancelled"
        if request in self.fetching:
            self.fetching.remove(request)
        elif request.slot_id == 0:
            self.waiting.remove(request)
        elif request.in_flight == 0:
            self._release(request, donate=True)
        if request.slot_id == 0:  # else a step under way has it, and reap does this
            self.prefix.forget_unproven(request.chain, request.total_len)

    def audit(self) -> None:
        """Pages, slots and requests add up."""
        audit(self.running, self.waiting, self.fetching, self.prefix, self.config)


def _num_accepted(outcome: Outcome, n: int) -> int:
    """Drafts of row n that are text now; its next token, if there is one, comes behind them."""
    return len(outcome.token_ids[n]) - (n not in outcome.broken)


def _broken_score(scored: Scored, scores: Sequence[Logprob]) -> int:
    """The first position of the prompt whose log-probability is no finite number; 0: all are."""
    return next((scored.position + n for n, s in enumerate(scores) if not math.isfinite(s.logprob)), 0)


def _scored(request: Request, start: int, end: int) -> Scored | None:
    """Of a chunk's tokens, those whose next one is the prompt's and has no score yet."""
    num_top = request.params.prompt_logprobs
    first, last = max(start, len(request.prompt_logprobs)), min(end, request.prompt_len - 1)
    if num_top is None or first >= last:
        return None
    return Scored(first - start, first + 1, request.ids[first + 1 : last + 1], num_top)
