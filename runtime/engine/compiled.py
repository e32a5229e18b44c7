"""What a step on a CPU needs around the engine, compiled: a call for each of feed, judge and prompt lookup.

They compute the same numbers as feed.py, judge.py and drafts/ngram.py.
"""

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
from hemiola.runtime.engine import sampling
from hemiola.runtime.engine.judge import masked
from hemiola.runtime.engine.ledger import Ledger
from hemiola.runtime.engine.request import Rule
from hemiola.runtime.engine.rules import Group
from hemiola.runtime.engine.sampling import logprobs
from hemiola.runtime.engine.step import Batch, Choices, Masks, Plan, Verdict, asked_of

SLOT, COMMITTED, EDGE = (COLUMNS.index(name) for name in ("slot", "committed", "edge"))
TOLD = 3  # of each row that chose, behind its tokens: accepted, judged, broken


def fill(plan: Plan, table: np.ndarray, ledger: Ledger) -> Batch:
    """Feed.fill; `table` is the page table by slot."""
    rows, num_lines, columns, chooses = [], [], [], []
    rules: list[Rule] = []
    num_tokens = 0
    for n, row in enumerate(plan.rows):
        num_tokens += row.num_tokens
        columns.append(
            (0, row.num_tokens, row.num_drafts, row.slot_id, 0, 0, row.snapshot_slot, row.snapshot_edge)
        )
        chooses.append(row.chooses)
        if row.chooses:
            rows.append(n)
            num_lines.append(1 + row.num_drafts)
            rules += [row.request.rule] * (1 + row.num_drafts)
    known = np.array(columns, np.int32)
    num_rows, num_choosing, num_logits = len(columns), len(rows), len(rules)
    token_ids, positions, logits_ids = torch.empty(
        2 * num_tokens + num_logits, dtype=torch.int32
    ).split_with_sizes([num_tokens, num_tokens, num_logits])
    longs = torch.empty(2 * (num_rows + num_choosing + num_logits), dtype=torch.int64).split_with_sizes(
        [num_rows, num_rows, num_choosing, num_choosing, num_logits, num_logits]
    )
    fed = torch.from_numpy(known)
    of_ledger = (ledger.ids, ledger.ids.shape[1], ledger.committed_len, ledger.edge)
    made = (token_ids, positions, logits_ids, *longs)
    _fill(1, 0.0, num_rows, fed, torch.tensor(chooses, dtype=torch.int64), *of_ledger, *made)
    slots, final_len, slot_id, num_drafts, row_of, offset = longs
    width = max(num_lines, default=1)
    return Batch(
        rows=fed,
        logits_ids=logits_ids,
        page_table=torch.from_numpy(table[known[:, SLOT]]),
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        final_len=final_len,
        choices=Choices(
            rows=rows,
            width=width,
            dense=num_logits == num_choosing * width,
            slot_id=slot_id,
            num_drafts=num_drafts,
            row=row_of,
            offset=offset,
            rules=rules,
            asked=asked_of(rows, num_lines, rules),
        ),
        masks=Masks.of(plan, ledger.device),
    )


def judge(batch: Batch, logits: torch.Tensor, ledger: Ledger, chunk_len: int) -> Verdict:
    """judge.judge, for a batch whose rows have their logits side by side and nothing between them."""
    choices, width = batch.choices, batch.choices.width
    chosen, bad = choose(masked(logits, batch.masks), choices, ledger)
    found = torch.zeros(len(choices.rows), width + TOLD, dtype=torch.int64)
    sizes = (len(batch.slots), len(choices.rows), width, chunk_len)
    of_batch = (batch.slots, batch.final_len, choices.slot_id, choices.num_drafts, chosen, bad)
    lengths = (ledger.total_len, ledger.committed_len, ledger.edge, ledger.num_drafts)
    _accept(1, 0.0, *sizes, *of_batch, ledger.ids, ledger.ids.shape[1], *lengths, found)
    num_accepted, num_judged, broken = found[:, width:].unbind(1)
    return Verdict(
        rows=choices.rows,
        token_ids=found[:, :width],
        num_accepted=num_accepted,
        num_judged=num_judged,
        broken=broken,
        logprobs={row: logprobs(logits[own], chosen[own], num) for row, own, num in choices.asked},
    )


def choose(logits: torch.Tensor, choices: Choices, ledger: Ledger) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of each line, and whether the line is broken, both [L] int64."""
    if any(isinstance(rule, Group) or rule.edits_logits or not rule.greedy for rule in choices.rules):
        line_slot = choices.slot_id[choices.row]
        position = ledger.total_len[line_slot] + choices.offset
        chosen = sampling.choose(logits, choices.rules, line_slot, position, ledger.ids)
        return chosen, sampling.broken(logits).to(torch.int64)
    return best(logits)


def best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of the best tokens of each line [L, V], or the first NaN; and whether it is not finite."""
    num_lines, vocab_size = logits.shape
    chosen, bad = torch.empty(2, num_lines, dtype=torch.int64).unbind()
    _choose(num_lines, 0.15 * num_lines * vocab_size, vocab_size, logits.contiguous(), chosen, bad)
    return chosen, bad


def look_up(ledger: Ledger, asked: np.ndarray, min_n: int, max_n: int) -> None:
    """Drafts by prompt lookup for lines (slot, how many at most) of asked [R, 2] int64."""
    of_ledger = (ledger.ids, ledger.ids.shape[1], ledger.total_len, ledger.num_drafts)
    cost = 2.0 * len(asked) * ledger.ids.shape[1]
    _look_up(len(asked), cost, min_n, max_n, torch.from_numpy(asked), *of_ledger)


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


@helper
def _slowly(at, vocab_size):
    """best_of, for numbers that are not all finite."""
    best = 0
    for i in range(1, vocab_size):
        value, known = get(at, i), get(at, best)
        if known == known and (value > known or value != value):
            best = i
    return best


@helper
def best_of(at, vocab_size):
    """The first of the best numbers, or the first that is NaN."""
    highest, zeros = splat(f32(-np.inf)), splat(f32(0.0))
    whole = vocab_size // LANES * LANES
    for i in range(0, whole, LANES):
        value = load(at, i)
        highest = largest(value, highest)
        zeros = add(zeros, mul(value, splat(f32(0.0))))  # NaN, if one is not finite
    top, rest = peak(highest), f32(0.0)
    for i in range(whole, vocab_size):
        top, rest = max(top, get(at, i)), rest + get(at, i) * f32(0.0)
    if total(zeros) + rest != f32(0.0):  # also if it is NaN
        return _slowly(at, vocab_size)
    best = 0
    while get(at, best) != top:
        best += 1
    return best


@Kernel
def _choose(line, scratch, vocab_size, logits, chosen, bad):
    """An item is a line."""
    at = logits + 4 * line * vocab_size
    token = best_of(at, vocab_size)
    value = get(at, token)
    put_long(chosen, line, token)
    put_long(bad, line, 0 if value - value == f32(0.0) else 1)


@Kernel
def _accept(
    item, scratch, num_rows, num_choosing, width, chunk_len, slots, final_len, slot_id, num_drafts, chosen,
    bad, ids, ids_len, total_len, committed_len, edges, ledger_drafts, found,
):  # fmt: skip
    """One item: all rows. See judge.py for the law."""
    for n in range(num_rows):
        slot, final = get_long(slots, n), get_long(final_len, n)
        put_long(committed_len, slot, final)
        put_long(edges, slot, final - final % chunk_len)
    line = 0
    for r in range(num_choosing):
        slot, drafts, at = get_long(slot_id, r), get_long(num_drafts, r), r * (width + TOLD)
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
def _look_up(item, scratch, min_n, max_n, asked, ids, ids_len, total_len, num_drafts):
    """An item is a row: what followed the latest earlier occurrence of the longest suffix."""
    slot, room = get_long(asked, 2 * item), get_long(asked, 2 * item + 1)
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
