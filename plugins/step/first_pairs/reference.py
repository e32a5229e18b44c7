"""The truth: one pair after the other.

A pair is a token x_p and the trunk's hidden state before it, h_{p-1}. The tokens p of a step bring the pairs
p + 1: their hidden states are at hand, and the next tokens are in the ledger by then. Some pairs are owed by
earlier steps; the states before them are in the ring of the slot, by position. Pairs behind a rejected draft
are wrong; the next step overwrites them.
"""

from itertools import pairwise

import torch

from hemiola.plugins.rows import COLUMNS
from hemiola.plugins.step.plan import COMMITTED, DRAFTS, PlanFields

START = COLUMNS.index("committed")


def first_pairs(
    plan: torch.Tensor,  # [N + 1, 10]
    rows: torch.Tensor,  # [N, 8] of the trunk: before the step was accepted
    hidden: torch.Tensor,  # [T, F]
    ring: torch.Tensor,  # [S, R, F]
    lengths: torch.Tensor,  # [4, S] after the step was accepted
    ids: torch.Tensor,  # [S, W]
    num_pairs: int,
    num_drafting: int,
) -> tuple[torch.Tensor, ...]:
    """The head's rows [N, 8]; of each pair [P] its id, the state before it [P, F] and its position; of each
    row that drafts [D] the pair whose output is wanted, and the slot. The ledger gets the number of drafts to
    come."""
    head_rows = torch.zeros(len(rows), 8, dtype=torch.int32)
    token_ids, positions = torch.zeros(2, num_pairs, dtype=torch.int32)
    before = torch.zeros(num_pairs, hidden.shape[1], dtype=hidden.dtype)
    wanted = torch.zeros(num_drafting, dtype=torch.int32)
    draft_slot = torch.zeros(num_drafting, dtype=torch.int64)
    for n, (row, after) in enumerate(pairwise(PlanFields(*line) for line in plan.tolist())):
        committed, num = int(rows[n, START]), after.pair - row.pair
        head_rows[n, 0] = row.pair
        if num:
            start = committed + 1 - row.owed
            head_rows[n] = torch.tensor([row.pair, num, 0, row.slot, start, 0, 0, 0])
        for pair in range(row.pair, after.pair):
            place = committed + 1 - row.owed + pair - row.pair
            token_ids[pair], positions[pair] = ids[row.slot, place], place
            if place <= committed:
                before[pair] = ring[row.slot, (place - 1) % ring.shape[1]]
            else:
                before[pair] = hidden[row.token + place - 1 - committed]
        if row.draft < after.draft:
            num_new = int(lengths[COMMITTED, row.slot]) - committed
            wanted[row.draft], draft_slot[row.draft] = row.pair + row.owed + num_new - 1, row.slot
            lengths[DRAFTS, row.slot] = row.room
    return head_rows, token_ids, before, positions, wanted, draft_slot
