"""What a step on a CPU needs around the engine, compiled: one call fills a batch, one judges it, and so on.

The same functions as in feed.py, judge.py and drafts/, from tensors to tensors, number for number.
"""

from typing import NamedTuple

import numpy as np
import torch

from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import (
    LANES,
    add,
    f32,
    get,
    get_int,
    get_long,
    largest,
    load,
    mul,
    peak,
    put_int,
    put_long,
    splat,
    total,
)
from hemiola.plugins.rows import COLUMNS
from hemiola.runtime.engine.ledger import Ledger

COMMITTED, EDGE = COLUMNS.index("committed"), COLUMNS.index("edge")


class Filled(NamedTuple):
    """What follows from the columns of a plan and the ledger, for T tokens, N rows, R that choose, L logits."""

    token_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32
    logits_ids: torch.Tensor  # [L] int32
    slots: torch.Tensor  # [N] int64
    final_len: torch.Tensor  # [N] int64
    slot_id: torch.Tensor  # [R] int64
    num_drafts: torch.Tensor  # [R] int64
    row: torch.Tensor  # [L] int64
    offset: torch.Tensor  # [L] int64


def fill(ledger: Ledger, rows: torch.Tensor, chooses: torch.Tensor, sizes: tuple[int, int, int]) -> Filled:
    """`rows` [N, 8] int32 get their columns committed and edge; sizes are T, R and L."""
    num_rows, (num_tokens, num_choosing, num_logits) = len(rows), sizes
    ints = torch.empty(2 * num_tokens + num_logits, dtype=torch.int32)
    longs = torch.empty(2 * (num_rows + num_choosing + num_logits), dtype=torch.int64)
    filled = Filled(
        *ints.split([num_tokens, num_tokens, num_logits]),
        *longs.split([num_rows] * 2 + [num_choosing] * 2 + [num_logits] * 2),
    )
    known = (ledger.ids, ledger.ids.shape[1], ledger.committed_len, ledger.edge)
    _fill(1, 0.0, num_rows, rows, chooses, *known, *filled)
    return filled


def choose(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each line [L, V], int64, and whether it is broken: see sampling.choose and .broken."""
    chosen = torch.empty(2, len(logits), dtype=torch.int64)
    logits = logits.contiguous()
    num_lines, vocab_size = logits.shape
    _choose(num_lines, 0.15 * num_lines * vocab_size, vocab_size, logits, chosen[0], chosen[1])
    return chosen[0], chosen[1]


class Accepted(NamedTuple):
    """Of R rows, as in step.Verdict."""

    token_ids: torch.Tensor  # [R, width]
    num_accepted: torch.Tensor
    num_judged: torch.Tensor
    broken: torch.Tensor


def accept(
    ledger: Ledger,
    chunk_len: int,
    slots: torch.Tensor,  # [N]
    final_len: torch.Tensor,  # [N]
    slot_id: torch.Tensor,  # [R]
    num_drafts: torch.Tensor,  # [R]; a row has one logit more
    width: int,
    chosen: torch.Tensor,  # [L]
    bad: torch.Tensor,  # [L] int64
) -> Accepted:
    """Which drafts stay, and what the ledger knows then."""
    num_rows = len(slot_id)
    found = torch.zeros(num_rows, width + 3, dtype=torch.int64)
    of_ledger = (
        ledger.ids,
        ledger.ids.shape[1],
        ledger.total_len,
        ledger.committed_len,
        ledger.edge,
        ledger.num_drafts,
    )
    sizes = (len(slots), num_rows, width, chunk_len, slots, final_len, slot_id, num_drafts, chosen, bad)
    _accept(1, 0.0, *sizes, *of_ledger, found)
    counts = found[:, width:]
    return Accepted(found[:, :width], counts[:, 0], counts[:, 1], counts[:, 2])


def look_up(ledger: Ledger, slots: np.ndarray, room: np.ndarray, min_n: int, max_n: int) -> None:
    """Drafts by prompt lookup (drafts/ngram.py) for these slots [R] int64, at most room[R] each."""
    of_ledger = (ledger.ids, ledger.ids.shape[1], ledger.total_len, ledger.num_drafts)
    where = (torch.from_numpy(slots), torch.from_numpy(room))
    _look_up(len(slots), 2.0 * ledger.ids.shape[1] * len(slots), min_n, max_n, *where, *of_ledger)


@Kernel
def _fill(
    item, scratch, num_rows, rows, chooses, ids, ids_len, committed_len, edges,
    token_ids, positions, logits_ids, slots, final_len, slot_id, num_drafts, row_of, offset_of,
):  # fmt: skip
    """One item: all rows."""
    t, choosing, line = 0, 0, 0
    for n in range(num_rows):
        at = 8 * n
        num, drafts, slot = get_int(rows, at + 1), get_int(rows, at + 2), get_int(rows, at + 3)
        committed = get_long(committed_len, slot)
        put_int(rows, at, t)
        put_int(rows, at + COMMITTED, committed)
        put_int(rows, at + EDGE, get_long(edges, slot))
        put_long(slots, n, slot)
        put_long(final_len, n, committed + num - drafts)
        for i in range(num):
            put_int(token_ids, t + i, get_int(ids, slot * ids_len + committed + i))
            put_int(positions, t + i, committed + i)
        t += num
        if get_long(chooses, n) == 0:
            continue
        put_long(slot_id, choosing, slot)
        put_long(num_drafts, choosing, drafts)
        for i in range(drafts + 1):
            put_int(logits_ids, line, t - drafts - 1 + i)
            put_long(row_of, line, choosing)
            put_long(offset_of, line, i)
            line += 1
        choosing += 1


@Kernel
def _choose(line, scratch, vocab_size, logits, chosen, bad):
    """An item is a line: the first of the best, or the first that is NaN."""
    at = logits + 4 * line * vocab_size
    highest, zeros = splat(f32(-np.inf)), splat(f32(0.0))
    whole = vocab_size // LANES * LANES
    for i in range(0, whole, LANES):
        value = load(at, i)
        highest = largest(value, highest)
        zeros = add(zeros, mul(value, splat(f32(0.0))))  # NaN, if one is not finite
    best, top = 0, peak(highest)
    for i in range(whole, vocab_size):
        top = max(top, get(at, i))
    if total(zeros) == f32(0.0):
        while get(at, best) != top and best < vocab_size - 1:
            best += 1
        best = best if get(at, best) == top else _slowly(at, vocab_size)
    else:
        best = _slowly(at, vocab_size)
    value = get(at, best)
    put_long(chosen, line, best)
    put_long(bad, line, 0 if value - value == f32(0.0) else 1)


@helper
def _slowly(at, vocab_size):
    """The same for lines with NaN or infinities."""
    best = 0
    for i in range(1, vocab_size):
        value, known = get(at, i), get(at, best)
        if known == known and (value > known or value != value):
            best = i
    return best


@Kernel
def _accept(
    item, scratch, num_rows, num_choosing, width, chunk_len, slots, final_len, slot_id, num_drafts, chosen, bad,
    ids, ids_len, total_len, committed_len, edges, ledger_drafts, found,
):  # fmt: skip
    """One item: all rows. See judge.py for the law."""
    for n in range(num_rows):
        slot, final = get_long(slots, n), get_long(final_len, n)
        put_long(committed_len, slot, final)
        put_long(edges, slot, final - final % chunk_len)
    line = 0
    for r in range(num_choosing):
        slot, drafts, at = get_long(slot_id, r), get_long(num_drafts, r), r * (width + 3)
        text = get_long(total_len, slot)
        judged, accepted = min(drafts, get_long(ledger_drafts, slot)), 0
        for i in range(drafts + 1):
            put_long(found, at + i, get_long(chosen, line + i))
        while (
            accepted < judged
            and get_long(bad, line + accepted) == 0
            and get_long(chosen, line + accepted) == get_int(ids, slot * ids_len + text + accepted)
        ):
            accepted += 1
        put_int(ids, slot * ids_len + text + accepted, get_long(chosen, line + accepted))
        put_long(total_len, slot, text + accepted + 1)
        put_long(committed_len, slot, text + accepted)
        put_long(ledger_drafts, slot, 0)
        put_long(found, at + width, accepted)
        put_long(found, at + width + 1, judged)
        put_long(found, at + width + 2, get_long(bad, line + accepted))
        line += drafts + 1


@Kernel
def _look_up(item, scratch, min_n, max_n, slots, rooms, ids, ids_len, total_len, num_drafts):
    """An item is a row: what followed the latest earlier occurrence of the longest suffix."""
    slot, room = get_long(slots, item), get_long(rooms, item)
    text, end = ids + 4 * slot * ids_len, get_long(total_len, slot)
    last, best, longest = end - 1, -1, min_n - 1
    for place in range(last - 1, -1, -1):
        if get_int(text, place) != get_int(text, last):
            continue
        num = 1
        while num < max_n and num <= place and get_int(text, place - num) == get_int(text, last - num):
            num += 1
        if num > longest:
            best, longest = place, num
            if num == max_n:
                break
    if best < 0:
        put_long(num_drafts, slot, 0)
        return
    for i in range(room):
        put_int(text, end + i, get_int(text, best + 1 + i % (last - best)))
    put_long(num_drafts, slot, room)
