"""An engine without a model around the real prefix cache: it follows the protocol and checks what it gets.

Where a model keeps keys, values and states, it keeps the tokens they were computed from. So whatever a
request finds in a page or a slot can be compared with what it should have computed. What is freed is
forgotten.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hemiola.runtime.cache.eviction import Cost, Evictor
from hemiola.runtime.cache.pages import PagePool
from hemiola.runtime.cache.prefix import PrefixCache, Start, Take, reusable_len
from hemiola.runtime.cache.slots import SlotPool
from hemiola.runtime.cache.tree import Chain, Entry

VOCAB = 4  # so small that texts meet again by themselves


def next_token(context: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(context, np.int32).tobytes()) % VOCAB


@dataclass(eq=False)
class Request:
    ids: np.ndarray
    prompt_len: int
    total_len: int
    chain: Chain
    committed_len: int = 0
    slot_id: int = 0
    start: Start | None = None

    @property
    def finished(self) -> bool:
        return self.total_len == len(self.ids)

    def known(self, num_tokens: int) -> tuple[int, ...]:
        assert num_tokens <= self.total_len, "a token that nobody knows yet"
        return tuple(self.ids[:num_tokens].tolist())


@dataclass
class Row:
    request: Request
    num_tokens: int
    drafts: list[int]
    take: Take | None = None


class House:
    """Scheduler and engine in one. `step` is one step; what may happen between two steps is a method too."""

    def __init__(
        self,
        num_pages: int = 65,
        num_slots: int = 17,
        page_len: int = 4,
        chunk_len: int = 2,
        max_len: int = 48,
        hybrid: bool = True,
        interval: int = 0,
        num_drafts: int = 0,
        max_rows: int = 8,
        donate: bool = False,
        budget: int = 1000,
        identity: str = "",
        seed: int = 0,
    ) -> None:
        self.pages = PagePool(num_pages, page_len, num_slots, -(-max_len // page_len) + 1, self._free_pages)
        self.slots = SlotPool(num_slots, chunk_len, self._free_slots)
        self.evictor = Evictor(Cost(10, 40 if hybrid else 0), page_len)
        self.prefix = PrefixCache(self.pages, self.slots, self.evictor, identity, interval)
        self.page_len, self.chunk_len, self.max_len = page_len, chunk_len, max_len
        self.hybrid, self.num_drafts = hybrid, num_drafts
        self.max_rows, self.donate, self.budget = max_rows, donate, budget
        self.random = random.Random(seed)
        self.kv: dict[tuple[int, int], object] = {}  # by page and offset
        self.state: dict[int, tuple[int, ...]] = {}  # by slot
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.done: list[Request] = []

    def _free_pages(self, page_ids: list[int]) -> None:
        for page_id in page_ids:
            for offset in range(self.page_len):
                self.kv.pop((page_id, offset), None)

    def _free_slots(self, slot_ids: list[int]) -> None:
        for slot_id in slot_ids:
            self.state.pop(slot_id, None)

    # What users do.

    def submit(self, prompt: Sequence[int], num_new: int = 1, tenant: str = "") -> Request:
        ids = np.zeros(min(len(prompt) + num_new, self.max_len), np.int32)
        ids[: len(prompt)] = prompt
        chain = self.prefix.chain(ids, tenant)
        self.waiting.append(Request(ids, len(prompt), len(prompt), chain))
        return self.waiting[-1]

    def abort(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._release(request)
        self.done.append(request)

    # The scheduler.

    def step(self) -> None:
        self.prefix.tick()
        rows, restores = self.plan()
        self.run(rows, restores)
        self.commit(rows)

    def drain(self, most: int = 500) -> None:
        for _ in range(most):
            if not self.running and not self.waiting:
                return
            self.step()
            self.audit()
        raise AssertionError("requests wait for ever")

    def serve(self, prompt: Sequence[int], num_new: int = 1, tenant: str = "") -> Request:
        """One request, alone, to its end."""
        request = self.submit(prompt, num_new, tenant)
        self.drain()
        return request

    def hit(self, prompt: Sequence[int], num_new: int = 1, tenant: str = "") -> int:
        """Tokens that this request, served now, finds."""
        start = self.serve(prompt, num_new, tenant).start
        assert start is not None
        return start.hit_len

    def plan(self) -> tuple[list[Row], list[tuple[int, int]]]:
        rows: list[Row] = []
        budget = self.budget
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            drafts = self._drafts(request)
            if not self._make_room(request, request.total_len + len(drafts)):
                break
            rows.append(self._row(request, budget, drafts))
            budget -= rows[-1].num_tokens + len(drafts)
        restores: list[tuple[int, int]] = []
        while budget > 0 and self.waiting and len(self.running) < self.max_rows:
            request = self.waiting[0]
            expected = self.expected_hit(request)
            start = self.prefix.admit(request.chain, request.total_len, len(self.running))
            if start is None:
                break
            assert start.hit_len == expected, f"a hit of {start.hit_len} tokens instead of {expected}"
            request.slot_id, request.committed_len, request.start = start.slot_id, start.hit_len, start
            if start.restore_from:
                restores.append((start.restore_from, start.slot_id))
            self.running.append(self.waiting.pop(0))
            rows.append(self._row(request, budget, []))
            budget -= rows[-1].num_tokens
        for row in rows:
            edge = int(self.slots.edge[row.request.slot_id])
            row.take = self.prefix.take(row.request.slot_id, edge, self._next_edge(row))
        assert rows or not (self.waiting or self.running), "nothing can run"
        return rows, restores

    def _row(self, request: Request, budget: int, drafts: list[int]) -> Row:
        stop = min(request.total_len, request.committed_len + budget)
        if stop > request.committed_len + 1:
            stop = self.prefix.chunk_end(request.slot_id, int(self.slots.edge[request.slot_id]), stop)
        return Row(request, stop - request.committed_len, drafts)

    def _drafts(self, request: Request) -> list[int]:
        """Some right ones, then some wrong ones."""
        if request.total_len - request.committed_len > 1:
            return []
        most = min(self.num_drafts, len(request.ids) - request.total_len)
        context = list(request.known(request.total_len))
        drafts: list[int] = []
        right = True
        for _ in range(self.random.randint(0, most)):
            token = next_token(context)
            right = right and self.random.random() < 0.8
            drafts.append(token if right else (token + 1) % VOCAB)
            context.append(drafts[-1])
        return drafts

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        while not self.prefix.grow(request.slot_id, num_tokens):
            youngest = self.running[-1]
            self.preempt(youngest)
            if youngest is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        self._release(request)
        self.waiting.insert(0, request)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.prefix.release(request.slot_id, self.donate)
        request.slot_id = request.committed_len = 0

    def _next_edge(self, row: Row) -> int:
        return (row.request.committed_len + row.num_tokens) // self.chunk_len * self.chunk_len

    # The engine.

    def run(self, rows: list[Row], restores: list[tuple[int, int]]) -> None:
        for source, target in restores:
            assert source in self.state, f"snapshot {source} was overwritten before it was read"
            self.state[target] = self.state[source]
        for row in rows:
            self._check(row.request)
        for row in rows:
            request = row.request
            for position in range(
                request.committed_len, request.committed_len + row.num_tokens + len(row.drafts)
            ):
                self.kv[self._writable(request, position)] = "of a draft"
            if row.take is not None:
                edge = int(self.slots.edge[request.slot_id])
                assert edge < row.take.edge <= self._next_edge(row), "a snapshot that this step cannot store"
                assert row.take.slot_id not in self.state, "a snapshot over another"
                self.state[row.take.slot_id] = request.known(row.take.edge)
            self.state[request.slot_id] = request.known(self._next_edge(row))

    def _check(self, request: Request) -> None:
        """What the row reads is what it would have computed."""
        for position in range(request.committed_len):
            found = self.kv.get(self._place(request, position))
            assert found == request.known(position + 1), f"position {position} holds {found}"
        edge = int(self.slots.edge[request.slot_id])
        assert 0 <= request.committed_len - edge < self.chunk_len + self.num_drafts
        if edge and self.hybrid:
            assert self.state.get(request.slot_id) == request.known(edge), "the slot holds another state"

    def _place(self, request: Request, position: int) -> tuple[int, int]:
        page_id = int(self.pages.table[request.slot_id, position // self.page_len])
        assert page_id, f"position {position} has no page"
        return page_id, position % self.page_len

    def _writable(self, request: Request, position: int) -> tuple[int, int]:
        place = self._place(request, position)
        assert not self.pages.is_cached(place[0]), "a row writes a cached page"
        assert self.pages.refs[place[0]] == 1, "a row writes a page of others"
        return place

    def commit(self, rows: list[Row]) -> None:
        """Verify the drafts, append what follows, fill in what looks ahead, publish; see who has finished."""
        for row in rows:
            request = row.request
            final_len = request.committed_len + row.num_tokens
            first, request.committed_len = request.committed_len, final_len
            if final_len == request.total_len:
                self._append(request, row.drafts)
            for position in range(first, request.committed_len):
                content = request.known(position + 1)
                self.kv[self._place(request, position)] = content
            self.slots.commit([request.slot_id], [final_len])
            stored_edge = row.take.edge if row.take is not None else 0
            self.prefix.commit(request.slot_id, request.committed_len, request.total_len, stored_edge)
            if request.finished:
                self._release(request)
                self.done.append(request)

    def _append(self, request: Request, drafts: list[int]) -> None:
        for draft in [*drafts, -1]:
            token = next_token(request.known(request.total_len))
            request.ids[request.total_len] = token
            request.total_len += 1
            if request.finished or token != draft:
                return
            request.committed_len += 1

    # What must hold.

    def expected_hit(self, request: Request) -> int:
        """By looking at everything that is cached."""
        known_len = request.total_len
        pages: set[bytes] = set()
        snapshots: set[bytes] = set()
        for token_ids, entry in self.prefix.contents():
            if entry.step < self.prefix.step and self._salt(entry) == request.chain.salt:
                ahead = np.frombuffer(entry.tokens, np.int32)[self.page_len :]
                pages.add(np.array([*token_ids, *ahead], np.int32).tobytes())
                if entry.slot_id:
                    snapshots.add(np.array([*token_ids, *ahead], np.int32).tobytes())
        hit = 0
        for edge in range(self.page_len, reusable_len(known_len, self.page_len) + 1, self.page_len):
            key = request.ids[:edge].tobytes()
            if key not in pages:
                break
            if not self.hybrid or key in snapshots:
                hit = edge
        return hit

    def _salt(self, entry: Entry) -> bytes:
        while entry.parent is not None:
            entry = entry.parent
        return entry.tokens

    def audit(self) -> None:
        """Ownership, and the content of every cached page and snapshot."""
        self.prefix.audit()
        assert {r.slot_id for r in self.running} == set(self.prefix._leases)
        for token_ids, entry in self.prefix.contents():
            ahead = np.frombuffer(entry.tokens, np.int32)[self.page_len :].tolist()
            known = tuple([*token_ids, *ahead])
            for offset in range(self.page_len):
                position = entry.edge - self.page_len + offset
                found = self.kv.get((entry.page_id, offset))
                assert found == known[: position + 1], f"page {entry.page_id} holds {found}"
            if entry.slot_id:
                assert self.state.get(entry.slot_id) == tuple(token_ids), f"snapshot {entry.slot_id}"

    def snapshots(self) -> list[tuple[int, str]]:
        """(edge, kind) of all there are."""
        entries = (entry for _, entry in self.prefix.contents())
        return sorted((entry.edge, entry.kind) for entry in entries if entry.slot_id)
