"""Multi-token prediction: one trained head, iterated.

The head reads pairs (x_p, h_{p-1}): a token and the trunk's hidden state before it, after the final norm.
The pair of token p has its key and value at place p of the request's pages, so what a page holds depends on
its own tokens only. Place 0 has no pair: the head's attention begins at 1.

The hidden states of the last tokens are kept in the slot, by position: a row begins with the pair of its
first new token, whose hidden state belongs to an earlier step.
"""

from typing import NamedTuple

import numpy as np
import torch

from hemiola.runtime.cache.pages import Pages
from hemiola.runtime.request import Request
from hemiola.runtime.sampling import Draw, choose
from hemiola.runtime.scheduler import Plan
from hemiola.runtime.session import Drafter

HIDDEN = "mtp.hidden"  # the slot state [R, F]


class _Row(NamedTuple):
    """A running row of the step whose pairs p = first .. last are to be read."""

    request: Request
    room: int
    start: int  # its first token of the step, in the step's hidden
    committed: int  # the position of that token
    first: int
    last: int


class MtpProposer:
    """Greedy requests get the head's best tokens, others are drawn with the noise that the trunk will use."""

    def __init__(self, session: Drafter, hidden_ring: torch.Tensor, pages: Pages, pad_tokens: int) -> None:
        self._session = session
        self._ring = hidden_ring  # [S, R, F]
        self._pages = pages
        self._pad_tokens = pad_tokens

    def propose(self, plan: Plan, room: list[int], hidden: torch.Tensor) -> None:
        rows = self._rows(plan, room)
        if not rows:
            return
        before = self._hidden_before(rows, hidden)
        self._keep(rows, hidden)
        pairs = [np.arange(row.first, row.last + 1) for row in rows]
        wanting = [row for row in rows if row.room > 0]
        logits, states = self._read(rows, pairs, before, wanting)
        while wanting:
            for row, scores in zip(wanting, logits, strict=True):
                row.request.drafts.append(choose(scores, _draw(row.request)))
            more = [i for i, row in enumerate(wanting) if len(row.request.drafts) < row.room]
            wanting = [wanting[i] for i in more]
            if wanting:
                places = [np.array([row.request.total_len + len(row.request.drafts) - 1]) for row in wanting]
                logits, states = self._read(wanting, places, states[more], wanting)

    def forget(self, request: Request) -> None:
        pass

    def _rows(self, plan: Plan, room: list[int]) -> list[_Row]:
        rows, start = [], 0
        for request, num_tokens, committed, own in zip(
            plan.rows, plan.num_tokens, plan.committed, room, strict=True
        ):
            if request.slot_id and request.finish_reason is None:
                capacity = self._pages.capacity[request.slot_id]
                last = min(request.committed_len, capacity - 1)
                rows.append(_Row(request, own, start, committed, max(committed, 1), last))
            start += num_tokens
        return rows

    def _hidden_before(self, rows: list[_Row], hidden: torch.Tensor) -> torch.Tensor:
        """h_{p-1} of every pair: of this step, but for a row's first pair, which looks back into the slot."""
        index = [np.arange(row.first, row.last + 1) - 1 - row.committed + row.start for row in rows]
        counts = [len(part) for part in index]
        flat = np.concatenate(index)
        looking = [n for n, row in enumerate(rows) if row.committed > 0 and counts[n] > 0]
        begins = np.cumsum([0, *counts])[looking]
        flat[begins] = 0
        before = hidden.index_select(0, torch.from_numpy(flat))
        if looking:
            slots = torch.tensor([rows[n].request.slot_id for n in looking])
            places = torch.tensor([(rows[n].committed - 1) % self._ring.shape[1] for n in looking])
            before[torch.from_numpy(begins)] = self._ring[slots, places]
        return before

    def _keep(self, rows: list[_Row], hidden: torch.Tensor) -> None:
        """Put the hidden states of the committed tokens into the slots' rings."""
        ring_len = self._ring.shape[1]
        slots, places, sources = [], [], []
        for row in rows:
            end = row.request.committed_len
            kept = np.arange(max(row.committed, end - ring_len), end)
            slots.append(np.full(len(kept), row.request.slot_id))
            places.append(kept % ring_len)
            sources.append(kept - row.committed + row.start)
        slot, place, source = (torch.from_numpy(np.concatenate(part)) for part in (slots, places, sources))
        self._ring[slot, place] = hidden.index_select(0, source)

    def _read(
        self, rows: list[_Row], pairs: list[np.ndarray], before: torch.Tensor, wanting: list[_Row]
    ) -> tuple[np.ndarray, torch.Tensor]:
        """Run the head over pairs; logits and hidden state of the last pair of each row that wants more."""
        ids = [_tokens(row.request, places) for row, places in zip(rows, pairs, strict=True)]
        ends = np.cumsum([len(part) for part in pairs])
        lasts = [int(end) - 1 for row, end in zip(rows, ends, strict=True) if row in wanting]
        padding = -int(ends[-1]) % self._pad_tokens
        slots = [row.request.slot_id for row in rows]
        table = self._pages.table[slots]
        cu_tokens = [0, *ends.tolist()]
        if padding:
            cu_tokens.append(cu_tokens[-1] + padding)
            table = np.concatenate((table, np.zeros_like(table[:1])))
            before = torch.cat((before, before.new_zeros(padding, before.shape[1])))
        logits, states = self._session.draft(
            token_ids=_int32(np.concatenate([*ids, np.zeros(padding)])),
            hidden=before,
            positions=_int32(np.concatenate([*pairs, np.ones(padding)])),
            cu_tokens=_int32(np.array(cu_tokens)),
            page_table=_int32(table),
            logits_ids=_int32(np.array(lasts)),
        )
        return logits.numpy(), states[lasts]


def _tokens(request: Request, places: np.ndarray) -> np.ndarray:
    """x_p: known ids, then drafts."""
    known = places < request.total_len
    return np.where(
        known,
        request.ids[np.minimum(places, request.total_len - 1)],
        request.drafts[-1] if request.drafts else 0,
    )


def _draw(request: Request) -> Draw:
    return Draw(request.params, request.seed, request.total_len + len(request.drafts))


def _int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))
