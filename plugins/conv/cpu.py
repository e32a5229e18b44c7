"""The causal convolution for all tokens of a step at once.

A token's columns are looked up in the ring, among the step's tokens, or are zero. Bits depend on them only: single
multiplications, additions and exp, in the order of the window (torch's silu treats the ends of a tensor differently).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from hemiola.plugins.grid import step_rows


class Window(NamedTuple):
    """Where a step's columns come from and which of them are kept."""

    ring_ids: torch.Tensor  # in rings of [slots * R] columns: those that the first tokens look back to
    sources: tuple[torch.Tensor, ...]  # by place in the window: [T] into ring columns, then tokens, then a zero
    stored_tokens: torch.Tensor
    stored_ids: torch.Tensor
    snapshots: tuple[tuple[int, int], ...]  # slot -> snapshot slot


def conv(
    x: torch.Tensor,  # [T, E]
    weight: torch.Tensor,  # [E, W]
    bias: torch.Tensor,  # [E]
    columns: torch.Tensor,  # [S, R, E]
    cu_tokens: torch.Tensor,
    slot_id: torch.Tensor,
    committed: torch.Tensor,
    edge: torch.Tensor,
    num_drafts: torch.Tensor,
    snapshot_slot: torch.Tensor,
    chunk_len: int,
) -> torch.Tensor:
    """y[T, E]; see reference.py."""
    rows = (cu_tokens, slot_id, committed, edge, num_drafts, snapshot_slot)
    key = tuple(tensor.numpy().tobytes() for tensor in rows)
    window = _window(key, x.shape[0], columns.shape[1], weight.shape[1], chunk_len)
    flat = columns.view(-1, columns.shape[2])
    source = torch.cat((flat.index_select(0, window.ring_ids), x.to(columns.dtype), flat.new_zeros(1, x.shape[1])))
    total = bias.to(flat.dtype).expand_as(x)
    for taps, index in zip(weight.to(flat.dtype).unbind(1), window.sources, strict=True):
        total = total + taps * source.index_select(0, index)
    flat.index_copy_(0, window.stored_ids, x.to(flat.dtype).index_select(0, window.stored_tokens))
    for slot, snapshot in window.snapshots:
        columns[snapshot] = columns[slot]
    return (total / (1 + torch.exp(-total))).to(x.dtype)


@lru_cache(maxsize=8)  # keyed by the rows' content: the layers of one step ask the same question
def _window(key: Sequence[bytes], num_tokens: int, ring_len: int, width: int, chunk_len: int) -> Window:
    tensors = [torch.frombuffer(bytearray(part), dtype=torch.int32) for part in key]
    ring_ids: list[int] = []
    stored_tokens, stored_ids, snapshots = [], [], []
    sources = np.full((width, num_tokens), -1, np.int64)  # -1 is the zero at the end
    rows = step_rows(tensors, chunk_len)
    for row in rows:
        past = range(max(row.committed - width + 1, 0), row.committed)
        first_past = len(ring_ids)
        ring_ids += [row.slot_id * ring_len + position % ring_len for position in past]
        count = row.end - row.committed
        tokens = np.arange(row.first, row.first + count)
        for w in range(width):
            back = width - 1 - w
            positions = np.arange(row.committed - back, row.end - back)
            from_ring = first_past + positions - (row.committed - len(past))
            sources[w, tokens] = np.where(positions >= row.committed, -2 - (tokens - back), from_ring)
            sources[w, tokens[positions < 0]] = -1
        keep = min(count, ring_len)
        stored_tokens.append(tokens[count - keep :])
        stored_ids.append(row.slot_id * ring_len + np.arange(row.end - keep, row.end) % ring_len)
        if row.snapshot_slot > 0:
            snapshots.append((row.slot_id, row.snapshot_slot))
    held = len(ring_ids)
    sources = np.where(sources == -1, held + num_tokens, np.where(sources < -1, held - 2 - sources, sources))
    return Window(
        ring_ids=torch.tensor(ring_ids, dtype=torch.int64),
        sources=tuple(torch.from_numpy(line.copy()) for line in sources),
        stored_tokens=torch.from_numpy(np.concatenate([*stored_tokens, np.zeros(0, np.int64)])),
        stored_ids=torch.from_numpy(np.concatenate([*stored_ids, np.zeros(0, np.int64)])),
        snapshots=tuple(snapshots),
    )
