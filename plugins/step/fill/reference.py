"""The truth: one row after the other."""

from itertools import pairwise

import torch

from hemiola.plugins.step.plan import COMMITTED, EDGE, TOTAL, PlanFields


def fill(
    plan: torch.Tensor,  # [N + 1, 10]
    table: torch.Tensor,  # [S, P] pages of each slot
    lengths: torch.Tensor,  # [4, S]
    ids: torch.Tensor,  # [S, W]
    num_tokens: int,
    num_lines: int,
) -> tuple[torch.Tensor, ...]:
    """Rows [N, 8] (plugins/rows.py), their pages [N, P], ids and positions of the tokens [T]; and of each
    line of logits [L] its token, its slot, and the position of the token that it chooses."""
    lines = [PlanFields(*line) for line in plan.tolist()]
    rows = torch.zeros(len(lines) - 1, 8, dtype=torch.int32)
    token_ids, positions = torch.zeros(2, num_tokens, dtype=torch.int32)
    line_token = torch.zeros(num_lines, dtype=torch.int32)
    line_slot, line_position = torch.zeros(2, num_lines, dtype=torch.int64)
    for n, (row, after) in enumerate(pairwise(lines)):
        committed, num = int(lengths[COMMITTED, row.slot]), after.token - row.token
        rows[n] = torch.tensor([
            row.token, num, row.num_drafts, row.slot, committed, int(lengths[EDGE, row.slot]),
            row.snapshot_slot, row.snapshot_edge,
        ])  # fmt: skip
        token_ids[row.token : after.token] = ids[row.slot, committed : committed + num]
        positions[row.token : after.token] = torch.arange(committed, committed + num)
        num_own = after.line - row.line
        line_token[row.line : after.line] = torch.arange(after.token - num_own, after.token)
        line_slot[row.line : after.line] = row.slot
        line_position[row.line : after.line] = lengths[TOTAL, row.slot] + torch.arange(num_own)
    pages = table[plan[:-1, PlanFields._fields.index("slot")].long()]
    return rows, pages, token_ids, positions, line_token, line_slot, line_position
