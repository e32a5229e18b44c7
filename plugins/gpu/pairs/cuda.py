"""What an MTP head reads, keeps and writes in a step of fixed sizes on a GPU, each part in one launch.

Pairs are tokens and the hidden states before them; a slot's ring has the states of its last tokens. For rows,
lengths and ids see plugins/gpu/ledger.
"""

import torch

from hemiola.plugins.gpu.launch import Kernel, cdiv, pow2

_before = Kernel("gpu.pairs", "_before")
_first_pairs = Kernel("gpu.pairs", "_first_pairs")
_keep = Kernel("gpu.pairs", "_keep")
_next_pairs = Kernel("gpu.pairs", "_next_pairs")

CHANNELS = 2048  # of a program
ROWS = 64  # of a program


def states_before(
    pair_row: torch.Tensor,  # [P] int64
    pair_offset: torch.Tensor,  # [P] int64 behind the row's first token; up to 0 the slot has the state
    rows: torch.Tensor,  # [N, 8] int32
    lengths: torch.Tensor,  # [4, S] int64
    hidden: torch.Tensor,  # [T, F]
    ring: torch.Tensor,  # [S, R, F]
) -> torch.Tensor:  # [P, F]
    """The state before each pair; and that before the edge of each snapshot is copied into the snapshot's."""
    num_pairs, (_, ring_len, width) = len(pair_row), ring.shape
    before = torch.empty(num_pairs, width, dtype=hidden.dtype, device=hidden.device)
    block = min(CHANNELS, pow2(width))
    _before[num_pairs + len(rows), cdiv(width, block)](
        pair_row, pair_offset, rows, lengths, hidden, ring, before, num_pairs, lengths.shape[1], ring_len,
        width, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return before


def keep(
    token_slot: torch.Tensor,  # [T] int64
    positions: torch.Tensor,  # [T] int32
    hidden: torch.Tensor,  # [T, F]
    ring: torch.Tensor,  # [S, R, F]
) -> None:
    """Put the states of tokens into their slots' rings."""
    _, ring_len, width = ring.shape
    block = min(CHANNELS, pow2(width))
    _keep[len(token_slot), cdiv(width, block)](
        token_slot, positions, hidden, ring, ring_len, width, BLOCK=block, num_warps=4
    )


def first_pairs(
    rows: torch.Tensor,  # [N, 8] int32 of the trunk
    slots: torch.Tensor,  # [N] int64
    room: torch.Tensor,  # [N] int64 drafts to come
    last: torch.Tensor,  # [N] int64 the pair behind a row's first token
    head_rows: torch.Tensor,  # [N, 8] int32, of which `committed` is filled in
    pair_row: torch.Tensor,  # [P] int64
    pair_offset: torch.Tensor,  # [P] int64
    pair_slot: torch.Tensor,  # [P] int64
    lengths: torch.Tensor,
    ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # [N], [P], [P] int32
    """The pair that each row drafts behind, ids and positions of the pairs; the ledger gets the room."""
    num_rows, num_pairs = len(slots), len(pair_row)
    wanted = torch.empty(num_rows, dtype=torch.int32, device=ids.device)
    token_ids, positions = (torch.empty(num_pairs, dtype=torch.int32, device=ids.device) for _ in range(2))
    _first_pairs[(cdiv(max(num_rows, num_pairs), ROWS),)](
        rows, slots, room, last, head_rows, pair_row, pair_offset, pair_slot, lengths, ids, wanted, token_ids,
        positions, num_rows, num_pairs, len(ids), ids.shape[1], BLOCK=ROWS, num_warps=2,
    )  # fmt: skip
    return wanted, token_ids, positions


def next_pairs(
    chosen: torch.Tensor,  # [N] int64
    slots: torch.Tensor,  # [N] int64
    room: torch.Tensor,  # [N] int64
    lengths: torch.Tensor,
    ids: torch.Tensor,
    at: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # [N, 8], [N], [N] int32
    """Draft number `at` goes into the ledger; rows, ids and positions of the pairs that bring the next."""
    num_rows = len(slots)
    rows = torch.empty(num_rows, 8, dtype=torch.int32, device=ids.device)
    token_ids, positions = (torch.empty(num_rows, dtype=torch.int32, device=ids.device) for _ in range(2))
    _next_pairs[(cdiv(num_rows, ROWS),)](
        chosen, slots, room, lengths, ids, rows, token_ids, positions, at, num_rows, ids.shape[1], BLOCK=ROWS,
        num_warps=2,
    )  # fmt: skip
    return rows, token_ids, positions
