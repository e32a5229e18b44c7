"""The absolute grid: which token of a step stands in which tile, and where its records lie.

A tile is C consecutive positions that start at a chunk edge. A row's tiles run from its edge to its last token;
the state a tile starts from is the state at that tile's edge. Everything here is integer bookkeeping: it depends
on the rows of the step only, so the layers of a model share one plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch


class Row(NamedTuple):
    """One row of a step that brings tokens, with everything that follows from its lengths."""

    slot_id: int
    first: int  # its first token of the step
    committed: int  # the absolute position of that token
    end: int  # the position behind its last token
    edge: int  # where the slot's state stands before the step
    new_edge: int  # and after it
    snapshot_slot: int


def step_rows(rows: Sequence[torch.Tensor], chunk_len: int) -> list[Row]:
    """The rows that do something: padding (slot 0) and rows without tokens are left out."""
    table = _table(_key(rows), chunk_len)
    return [Row(*line) for line in table.T.tolist()]


def check_ring(rows: np.ndarray, ring_len: int) -> None:
    """Refuse rows whose records a ring of `ring_len` tokens cannot hold."""
    held = np.maximum(rows[2] - rows[4], rows[3] - rows[5])
    if held.size and held.max() > ring_len:
        raise ValueError(f"{held.max()} records since an edge, but a ring holds {ring_len}")


def _key(rows: Sequence[torch.Tensor]) -> bytes:
    return b"".join([tensor.numpy().tobytes() for tensor in rows])


def _table(key: bytes, chunk_len: int) -> np.ndarray:
    """Rows that do something as columns, the fields of `Row` as lines."""
    flat = np.frombuffer(key, np.int32).astype(np.int64)
    num_rows = flat.size // 6
    cu_tokens = flat[: num_rows + 1]
    slot_id, committed, edge, num_drafts, snapshot_slot = flat[num_rows + 1 :].reshape(5, num_rows)
    end = committed + np.diff(cu_tokens)
    new_edge = (end - num_drafts) // chunk_len * chunk_len
    live = (end > committed) & (slot_id != 0)
    sane = (edge >= 0) & (edge % chunk_len == 0) & (edge <= committed) & (num_drafts >= 0)
    sane &= num_drafts <= end - committed
    if not (sane | ~live).all():
        row = int(np.flatnonzero(live & ~sane)[0])
        raise ValueError(
            f"row {row}: {end[row] - committed[row]} tokens of which {num_drafts[row]} drafts after "
            f"committed {committed[row]}, edge {edge[row]}, chunk_len {chunk_len}"
        )
    return np.stack([slot_id, cu_tokens[:-1], committed, end, edge, new_edge, snapshot_slot])[:, live]


class Spread(NamedTuple):
    """Where the vectors of H heads lie, in tensors of [tokens, H] and [tiles, H, C] vectors."""

    sources: torch.Tensor  # [tiles * H * C] into records, then new tokens, then one absent token
    queries: torch.Tensor  # [tiles * H * C] into new tokens, then one absent token
    outputs: torch.Tensor  # [live tokens * H] into tiles


class Kept(NamedTuple):
    """States to store: which rows' and to which slots."""

    ranks: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class Tiles:
    """The tiles of one step, ordered by ordinal within the row, then by row; longer rows come first."""

    chunk_len: int
    num_tokens: int
    num_tiles: int
    counts: list[int]  # rows that own a tile of this ordinal; they are the first ones
    slots: torch.Tensor  # [rows]
    first_slot: int  # the slots are this one and those right behind it; -1 where they are not, or a row is fresh
    fresh: torch.Tensor  # rows that start from a zero state
    folded: torch.Tensor  # tiles whose tokens a later state contains
    kept: dict[int, Kept]  # by ordinal of the tile that starts from the state
    record_ids: torch.Tensor  # in rings of [slots * ring] tokens
    live: torch.Tensor | None  # tokens that belong to a row, None if all
    stored_tokens: torch.Tensor | None  # tokens that become records, None if all
    stored_ids: torch.Tensor
    spread: dict[int, Spread]

    def gather(self, ring: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Records and new tokens [.., H, *F] as tiles [tiles, H, C, *F]; absent tokens are zeros."""
        parts = [new, new.new_zeros(1, *new.shape[1:])]
        if self.record_ids.numel():
            records = ring.view(-1, *ring.shape[2:]).index_select(0, self.record_ids)
            parts.insert(0, records)
        return self._tile(torch.cat(parts), self.spread[new.shape[1]].sources)

    def gather_queries(self, new: torch.Tensor) -> torch.Tensor:
        """New tokens [T, H, *F] as tiles [tiles, H, C, *F]; all others are zeros."""
        source = torch.cat([new, new.new_zeros(1, *new.shape[1:])])
        return self._tile(source, self.spread[new.shape[1]].queries)

    def _tile(self, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        features = source.shape[2:]
        flat = source.view(-1) if features.numel() == 1 else source.flatten(0, 1)
        return flat.index_select(0, index).view(self.num_tiles, source.shape[1], self.chunk_len, *features)

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

    def start(self, state: torch.Tensor) -> torch.Tensor:
        """The rows' states [rows, ...] at their edges; possibly a view."""
        if self.first_slot >= 0:
            return state.narrow(0, self.first_slot, self.counts[0])
        if self.fresh.numel() == self.counts[0]:
            return state.new_zeros(self.counts[0], *state.shape[1:])
        start = state.index_select(0, self.slots)
        return start.index_fill_(0, self.fresh, 0) if self.fresh.numel() else start

    def keep(self, ordinal: int, state: torch.Tensor, current: torch.Tensor) -> None:
        """Store those of the states before tiles of this ordinal that stand at a row's new edge."""
        if (kept := self.kept.get(ordinal)) is not None:
            state.index_copy_(0, kept.slots, current.index_select(0, kept.ranks))

    def store(self, ring: torch.Tensor, new: torch.Tensor) -> None:
        """Write the new tokens' records."""
        if self.stored_tokens is not None:
            new = new.index_select(0, self.stored_tokens)
        ring.view(-1, *ring.shape[2:]).index_copy_(0, self.stored_ids, new)


def plan_tiles(
    rows: Sequence[torch.Tensor], num_tokens: int, chunk_len: int, ring_len: int, heads: tuple[int, ...]
) -> Tiles | None:
    """The tiles of a step for tensors with these head counts; None where no row does anything."""
    return _plan_tiles(_key(rows), num_tokens, chunk_len, ring_len, heads)


@lru_cache(maxsize=8)  # keyed by the rows' content: the layers of one step ask the same question
def _plan_tiles(
    key: bytes, num_tokens: int, chunk_len: int, ring_len: int, heads: tuple[int, ...]
) -> Tiles | None:
    table = _table(key, chunk_len)
    check_ring(table, ring_len)
    if table.shape[1] == 0:
        return None
    _, _, _, end, edge, new_edge, _ = table
    num_tiles = np.maximum(-((edge - end) // chunk_len), (new_edge - edge) // chunk_len + 1)
    order = np.lexsort((table[0], -num_tiles))
    slot, first, committed, end, edge, new_edge, snapshot = table[:, order]
    num_tiles = num_tiles[order]

    counts = slot.size - np.cumsum(np.bincount(num_tiles))[:-1]
    ordinal = np.repeat(np.arange(counts.size), counts)
    rank = np.arange(ordinal.size) - np.repeat(np.cumsum(counts) - counts, counts)
    place = edge[rank, None] + ordinal[:, None] * chunk_len + np.arange(chunk_len)  # [tiles, C] positions
    is_record = place < committed[rank, None]
    is_new = ~is_record & (place < end[rank, None])
    ring_ids = slot[rank, None] * ring_len + place % ring_len
    token_ids = (first - committed)[rank, None] + place
    num_records = int(is_record.sum())

    sources = np.where(is_new, num_records + token_ids, num_records + num_tokens)
    sources[is_record] = np.arange(num_records)
    queries = np.where(is_new, token_ids, num_tokens)
    new_tokens = token_ids[is_new]
    by_token = np.argsort(new_tokens)
    live = new_tokens[by_token]
    is_stored = is_new & (place >= new_edge[rank, None])
    stored_tokens = token_ids[is_stored]
    by_stored = np.argsort(stored_tokens)
    consecutive = slot[-1] - slot[0] == slot.size - 1 and (np.diff(slot) == 1).all()
    return Tiles(
        chunk_len=chunk_len,
        num_tokens=num_tokens,
        num_tiles=ordinal.size,
        counts=counts.tolist(),
        slots=torch.from_numpy(slot.copy()),
        first_slot=int(slot[0]) if consecutive and committed.all() else -1,
        fresh=torch.from_numpy(np.flatnonzero(committed == 0)),
        folded=torch.from_numpy(np.flatnonzero(ordinal + 1 < num_tiles[rank])),
        kept=_kept(slot, committed, (new_edge - edge) // chunk_len, snapshot),
        record_ids=torch.from_numpy(ring_ids[is_record]),
        live=None if live.size == num_tokens else torch.from_numpy(live),
        stored_tokens=None if stored_tokens.size == num_tokens else torch.from_numpy(stored_tokens[by_stored]),
        stored_ids=torch.from_numpy(ring_ids[is_stored][by_stored]),
        spread={h: _spread(h, sources, queries, np.flatnonzero(is_new)[by_token]) for h in heads},
    )


def _kept(slot: np.ndarray, committed: np.ndarray, ordinal: np.ndarray, snapshot: np.ndarray) -> dict[int, Kept]:
    """A slot's state is stored when it moves and when it comes into being; a snapshot always."""
    moved = np.flatnonzero((ordinal > 0) | (committed == 0))
    shot = np.flatnonzero(snapshot > 0)
    ranks = np.concatenate([moved, shot])
    slots = np.concatenate([slot[moved], snapshot[shot]])
    at = ordinal[ranks]
    return {
        int(j): Kept(torch.from_numpy(ranks[at == j]), torch.from_numpy(slots[at == j])) for j in np.unique(at)
    }


def _spread(heads: int, sources: np.ndarray, queries: np.ndarray, outputs: np.ndarray) -> Spread:
    """Indices of tokens turned into indices of heads' vectors."""
    head = np.arange(heads)
    chunk_len = sources.shape[1]
    tile, place = np.divmod(outputs, chunk_len)
    return Spread(
        sources=torch.from_numpy((sources[:, None, :] * heads + head[:, None]).reshape(-1)),
        queries=torch.from_numpy((queries[:, None, :] * heads + head[:, None]).reshape(-1)),
        outputs=torch.from_numpy(((tile[:, None] * heads + head) * chunk_len + place[:, None]).reshape(-1)),
    )
