"""The absolute grid: which token of a step stands in which tile, and where its records lie.

A tile is C consecutive positions that start at a chunk edge. A row's tiles run from its edge to its last
token; the state a tile starts from is the state at that tile's edge. All of it depends on the rows of the
step only, so the layers of a model share one plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

BIG_STATE = 16384  # numbers; from here on a call per run of slots costs less than copying states together

Visit = Callable[[int, torch.Tensor], None]
Move = Callable[[int, int, torch.Tensor], None]


class Row(NamedTuple):
    """One row of a step that brings tokens, with everything that follows from its lengths."""

    slot_id: int
    first: int  # its first token of the step
    committed: int  # the absolute position of that token
    end: int  # the position behind its last token
    edge: int  # where the slot's state stands before the step
    new_edge: int  # and after it
    snapshot_slot: int  # 0 unless the step passes the edge below
    snapshot_edge: int


def step_rows(rows: Sequence[torch.Tensor], chunk_len: int) -> list[Row]:
    """The rows that do something: padding (slot 0) and rows without tokens are left out."""
    table = row_table(rows_key(rows), chunk_len)
    return [Row(*line) for line in table.T.tolist()]


def check_ring(rows: np.ndarray, ring_len: int) -> None:
    """Refuse rows whose records a ring of `ring_len` tokens cannot hold."""
    held = np.maximum(rows[2] - rows[4], rows[3] - rows[5])
    if held.size and held.max() > ring_len:
        raise ValueError(f"{held.max()} records since an edge, but a ring holds {ring_len}")


class Work(NamedTuple):
    """What a step asks of a compiled recurrent kernel."""

    table: np.ndarray  # row_table
    address: int  # of its first number
    num_rows: int
    num_tokens: int
    num_updates: int  # tokens that states move over: records, then new ones
    num_held: int  # tokens since an edge that a ring must hold
    highest_slot: int
    last_token: int  # behind the last token of any row


def step_work(
    rows: Sequence[torch.Tensor], chunk_len: int, ring_len: int, num_slots: int, num_tokens: int
) -> Work:
    """Refuses rows whose records a ring of `ring_len` tokens cannot hold, and slots there are not."""
    work = _step_work(rows_key(rows), chunk_len)
    if work.num_held > ring_len:
        check_ring(work.table, ring_len)
    if work.highest_slot >= num_slots or work.last_token > num_tokens:
        raise IndexError(
            f"rows name slot {work.highest_slot} and {work.last_token} tokens, but there are "
            f"{num_slots} slots and {num_tokens} tokens"
        )
    return work


@lru_cache(maxsize=8)  # the layers of one step ask the same question
def _step_work(key: bytes, chunk_len: int) -> Work:
    table = np.ascontiguousarray(row_table(key, chunk_len))
    _, _, committed, end, edge, new_edge = table[:6]
    held = np.maximum(committed - edge, end - new_edge)
    num_held = int(held.max()) if held.size else 0
    num_tokens, num_updates = int((end - committed).sum()), int((end - edge).sum())
    slots, last = table[[0, 6]], table[1] + end - committed
    if slots.size and slots.min() < 0:
        raise IndexError(f"rows name slot {slots.min()}")
    highest_slot, last_token = int(slots.max(initial=0)), int(last.max(initial=0))
    shape = (table.shape[1], num_tokens, num_updates, num_held, highest_slot, last_token)
    return Work(table, table.ctypes.data, *shape)


def rows_key(rows: Sequence[torch.Tensor]) -> bytes:
    """The content of cu_tokens .. snapshot_edge, to plan by."""
    return b"".join([tensor.numpy().tobytes() for tensor in rows])


def row_table(key: bytes, chunk_len: int) -> np.ndarray:
    """Rows that do something as columns, the fields of `Row` as lines."""
    flat = np.frombuffer(key, np.int32).astype(np.int64)
    num_rows = flat.size // 7
    cu_tokens = flat[: num_rows + 1]
    slot_id, committed, edge, num_drafts, snapshot, snapshot_edge = flat[num_rows + 1 :].reshape(6, num_rows)
    end = committed + np.diff(cu_tokens)
    new_edge = (end - num_drafts) // chunk_len * chunk_len
    live = (end > committed) & (slot_id != 0)
    sane = (edge >= 0) & (edge % chunk_len == 0) & (edge <= committed) & (num_drafts >= 0)
    sane &= (num_drafts <= end - committed) & ((snapshot == 0) | (snapshot_edge % chunk_len == 0))
    if not (sane | ~live).all():
        row = int(np.flatnonzero(live & ~sane)[0])
        raise ValueError(
            f"row {row}: {end[row] - committed[row]} tokens of which {num_drafts[row]} drafts after "
            f"committed {committed[row]}, edge {edge[row]}, snapshot_edge {snapshot_edge[row]}, "
            f"chunk_len {chunk_len}"
        )
    snapshot = np.where((edge < snapshot_edge) & (snapshot_edge <= new_edge), snapshot, 0)
    table = [slot_id, cu_tokens[:-1], committed, end, edge, new_edge, snapshot, snapshot_edge]
    return np.stack(table)[:, live]


class Spread(NamedTuple):
    """Where the vectors of H heads lie, in tensors of [tokens, H] and [tiles, H, C] vectors."""

    sources: torch.Tensor  # [tiles * H * C] into rings, or into records and new tokens
    outputs: torch.Tensor  # [live tokens * H] into tiles


class Copies(NamedTuple):
    """States to store: where they are, and the slots that receive them."""

    sources: torch.Tensor  # empty: all of them, in order
    slots: torch.Tensor


class Run(NamedTuple):
    """Rows whose slots lie side by side."""

    rank: int
    slot_id: int
    num: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of one step, ordered by ordinal within the row, then by row; longer rows come first.

    A place of a tile without a token repeats the row's last token: finite numbers that no token reads, since
    every sum over a tile is masked to s <= t, and only full tiles move a state.
    """

    chunk_len: int
    num_tokens: int
    num_tiles: int
    counts: list[int]  # rows that own a tile of this ordinal; they are the first ones
    folds: list[int]  # rows whose state moves on from this ordinal's tile; they are the first ones, too
    slots: torch.Tensor  # [rows]
    runs: list[Run]
    fresh: torch.Tensor | None  # slots of rows that start from a zero state
    moved: dict[int, Copies]  # by ordinal of the tile that starts from the state: from row to slot
    folded: torch.Tensor | None  # tiles whose tokens a later state contains
    from_ring: bool  # the rings can hold every token of every tile at once
    record_ids: torch.Tensor  # else the tokens that only the rings hold
    live: torch.Tensor | None  # tokens that belong to a row, None if all
    stored: torch.Tensor | None  # tokens to write to the rings, None if all
    stored_ids: torch.Tensor
    spread: dict[int, Spread]
    query_ids: torch.Tensor  # [tiles * H * C] into the queries [T * G] of new tokens

    def take(self, ring: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Write new tokens [T, H, *F] to their ring [S, R, H, *F]; the tiles' tokens [tiles, H, C, *F]."""
        tokens = ring.view(-1, *ring.shape[2:])
        stored = new if self.stored is None else new.index_select(0, self.stored)
        if self.from_ring:
            source = tokens.index_copy_(0, self.stored_ids, stored)
        else:
            records = tokens.index_select(0, self.record_ids)
            source = torch.cat([records, new]) if self.record_ids.numel() else new
            tokens.index_copy_(0, self.stored_ids, stored)
        flat = source.reshape(-1) if new.shape[2:].numel() == 1 else source.flatten(0, 1)
        tiles = flat.index_select(0, self.spread[new.shape[1]].sources)
        return tiles.view(self.num_tiles, new.shape[1], self.chunk_len, *new.shape[2:])

    def take_queries(self, new: torch.Tensor) -> torch.Tensor:
        """Queries [T, G, F] as [tiles, H, C, F]; anything finite where no new token is."""
        flat = new.flatten(0, 1).index_select(0, self.query_ids)
        return flat.view(self.num_tiles, -1, self.chunk_len, new.shape[2])

    def select(self, tiles: torch.Tensor, heads: int) -> torch.Tensor:
        """The new tokens [live tokens, heads, F] out of tiles [tiles, heads, C, F]."""
        flat = tiles.view(-1, tiles.shape[-1])
        return flat.index_select(0, self.spread[heads].outputs).view(-1, heads, tiles.shape[-1])

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """Live tokens in their places among all tokens of the step; padding is zero."""
        if self.live is None:
            return values
        return values.new_zeros(self.num_tokens, *values.shape[1:]).index_copy_(0, self.live, values)

    def drop_padding(self, values: torch.Tensor) -> torch.Tensor:
        """The tokens that belong to a row."""
        return values if self.live is None else values.index_select(0, self.live)

    def scan(self, state: torch.Tensor, visit: Visit, move: Move) -> None:
        """Take every row's state from edge to edge, and store it where it stands at the new edge.

        `visit(first tile, states)` sees the states [rows, ...] that consecutive tiles start from and leaves
        them alone; `move(first tile, first fold, states)` makes them the states behind those tiles.
        """
        if self.fresh is not None:
            state.index_fill_(0, self.fresh, 0)
        if len(self.runs) == 1 or state[0].numel() >= BIG_STATE:
            for run in self.runs:
                visit(run.rank, state.narrow(0, run.slot_id, run.num))
        else:
            visit(0, state.index_select(0, self.slots))
        if not self.folds:
            return
        tile = fold = 0
        current = state.index_select(0, self.slots.narrow(0, 0, self.folds[0]))
        for ordinal, num in enumerate(self.folds):
            current = current.narrow(0, 0, num)
            move(tile, fold, current)
            tile += self.counts[ordinal]
            fold += num
            if (moved := self.moved.get(ordinal + 1)) is not None:
                source = current.index_select(0, moved.sources) if moved.sources.numel() else current
                state.index_copy_(0, moved.slots, source)
            if ordinal + 1 < len(self.counts):
                visit(tile, current.narrow(0, 0, self.counts[ordinal + 1]))


def plan_tiles(
    rows: Sequence[torch.Tensor],
    num_tokens: int,
    chunk_len: int,
    ring_len: int,
    groups: int,
    heads: int,
    query_heads: int,
) -> Tiles | None:
    """The tiles of a step with tensors of `groups` and `heads` vectors per token; queries come as groups and
    become `query_heads`. None where no row does anything."""
    return _plan_tiles(rows_key(rows), num_tokens, chunk_len, ring_len, groups, heads, query_heads)


@lru_cache(maxsize=8)  # keyed by the rows' content: the layers of one step ask the same question
def _plan_tiles(
    key: bytes, num_tokens: int, chunk_len: int, ring_len: int, groups: int, heads: int, query_heads: int
) -> Tiles | None:
    table = row_table(key, chunk_len)
    if table.shape[1] == 0:
        return None
    check_ring(table, ring_len)
    num_tiles = -((table[4] - table[3]) // chunk_len)
    num_folds = np.maximum(num_tiles - 1, (table[5] - table[4]) // chunk_len)
    order = np.lexsort((table[0], -num_folds, -num_tiles))
    num_tiles, num_folds = num_tiles[order], num_folds[order]
    slot, _, committed, end, edge, new_edge, snapshot, snapshot_edge = table[:, order]
    counts, folds = _more_than(num_tiles), _more_than(num_folds)
    ordinal = np.repeat(np.arange(counts.size), counts)
    rank = np.arange(ordinal.size) - np.repeat(np.cumsum(counts) - counts, counts)

    # one line per tile, one column per place in it
    slot_, first_, committed_, end_, edge_, new_edge_ = table[:6, order[rank], None]
    place = edge_ + (ordinal * chunk_len)[:, None] + np.arange(chunk_len)
    is_new = (place >= committed_) & (place < end_)
    place = np.minimum(place, end_ - 1)
    token_ids = place + (first_ - committed_)
    ring_ids = slot_ * ring_len + place % ring_len
    from_ring = int((end - edge).max()) <= ring_len
    is_record = place < committed_
    is_stored = is_new if from_ring else is_new & (place >= new_edge_)
    records = np.cumsum(is_record).reshape(place.shape)
    outputs = np.flatnonzero(is_new)
    live = token_ids.reshape(-1)[outputs]
    by_token = np.argsort(live)
    sources = ring_ids if from_ring else np.where(is_record, records - 1, records[-1, -1] + token_ids)
    stored = token_ids[is_stored]
    by_stored = np.argsort(stored)
    fresh = slot[committed == 0]
    return Tiles(
        chunk_len=chunk_len,
        num_tokens=num_tokens,
        num_tiles=ordinal.size,
        counts=counts.tolist(),
        folds=folds.tolist(),
        slots=torch.from_numpy(slot),
        runs=_runs(slot),
        fresh=torch.from_numpy(fresh) if fresh.size else None,
        moved=_copies(
            slot, (new_edge - edge) // chunk_len, snapshot, (snapshot_edge - edge) // chunk_len, folds
        ),
        folded=torch.from_numpy(np.flatnonzero(ordinal < num_folds[rank])) if folds.size else None,
        from_ring=from_ring,
        record_ids=torch.from_numpy(ring_ids[is_record]),
        live=_unless_all(live[by_token], num_tokens),
        stored=_unless_all(stored[by_stored], num_tokens),
        stored_ids=torch.from_numpy(ring_ids[is_stored][by_stored]),
        spread={h: _spread(h, sources, outputs[by_token]) for h in {groups, heads}},
        query_ids=_query_ids(groups, query_heads, np.maximum(token_ids, first_)),
    )


def _more_than(counts: np.ndarray) -> np.ndarray:
    """How many of the counts exceed 0, 1, 2, .. up to the largest."""
    return counts.size - np.cumsum(np.bincount(counts))[:-1]


def _unless_all(token_ids: np.ndarray, num_tokens: int) -> torch.Tensor | None:
    return None if token_ids.size == num_tokens else torch.from_numpy(token_ids)


def _copies(
    slot: np.ndarray, ordinal: np.ndarray, snapshot: np.ndarray, shot_ordinal: np.ndarray, folds: np.ndarray
) -> dict[int, Copies]:
    """What to store where: a state that moves goes to its slot, and one on the way to the snapshot of it."""
    moving, shot = np.flatnonzero(ordinal), np.flatnonzero(snapshot > 0)
    ranks, slots = np.concatenate([moving, shot]), np.concatenate([slot[moving], snapshot[shot]])
    at = np.concatenate([ordinal[moving], shot_ordinal[shot]])
    moved = {}
    for j in set(at.tolist()):
        sources = ranks[at == j]
        everything = sources.size == folds[j - 1] and (sources == np.arange(sources.size)).all()
        moved[j] = Copies(
            sources=torch.from_numpy(sources[:0] if everything else sources),
            slots=torch.from_numpy(slots[at == j]),
        )
    return moved


def _runs(slot: np.ndarray) -> list[Run]:
    starts = [0, *(np.flatnonzero(np.diff(slot) != 1) + 1).tolist(), slot.size]
    return [Run(a, int(slot[a]), b - a) for a, b in pairwise(starts)]


def _spread(heads: int, sources: np.ndarray, outputs: np.ndarray) -> Spread:
    """Indices of tokens turned into indices of heads' vectors."""
    head = np.arange(heads)
    chunk_len = sources.shape[1]
    tile, place = np.divmod(outputs, chunk_len)
    return Spread(
        sources=torch.from_numpy((sources[:, None, :] * heads + head[:, None]).reshape(-1)),
        outputs=torch.from_numpy(((tile[:, None] * heads + head) * chunk_len + place[:, None]).reshape(-1)),
    )


def _query_ids(groups: int, heads: int, token_ids: np.ndarray) -> torch.Tensor:
    group = np.arange(heads) // (heads // groups)
    return torch.from_numpy((token_ids[:, None, :] * groups + group[:, None]).reshape(-1))
