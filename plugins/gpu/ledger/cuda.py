"""What a step of fixed sizes does with ids and lengths on a GPU, each part in one launch.

A step has N rows and T tokens. Lengths are [4, S] int64: of a slot's text, of what is committed of it, of the
edge where its state stands, and the number of drafts behind the text; ids are [S, W] int32. Slot 0 is that of
padding rows, and zero.
"""

import torch

from hemiola.plugins.gpu.launch import Kernel, cdiv, pow2

_accept = Kernel("gpu.ledger", "_accept")
_change = Kernel("gpu.ledger", "_change")
_fill = Kernel("gpu.ledger", "_fill")
_tell = Kernel("gpu.ledger", "_tell")

CHANGES, TOKENS, IDS = 256, 64, 1024  # of a program


def change(changes: torch.Tensor, table: torch.Tensor) -> None:
    """Entries of the page table: changes [C, 2] int64 are places and pages."""
    num = len(changes)
    _change[(cdiv(num, CHANGES),)](changes, table, num, BLOCK=CHANGES, num_warps=4)


def fill(
    rows: torch.Tensor,  # [N, 8] int32, of which `committed` and `edge` are filled in
    slots: torch.Tensor,  # [N] int64
    token_row: torch.Tensor,  # [T] int64
    token_offset: torch.Tensor,  # [T] int64
    table: torch.Tensor,  # [S, P] int32
    lengths: torch.Tensor,
    ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # [N, P], [T], [T] int32
    """Pages of the rows, ids and positions of the tokens."""
    num_rows, num_tokens, (num_slots, table_len) = len(slots), len(token_row), table.shape
    page_table = torch.empty(num_rows, table_len, dtype=torch.int32, device=ids.device)
    token_ids, positions = (torch.empty(num_tokens, dtype=torch.int32, device=ids.device) for _ in range(2))
    _fill[(num_rows + cdiv(num_tokens, TOKENS),)](
        rows, slots, token_row, token_offset, table, lengths, ids, page_table, token_ids, positions, num_rows,
        num_tokens, num_slots, table_len, ids.shape[1], BLOCK=TOKENS, num_warps=2,
    )  # fmt: skip
    return page_table, token_ids, positions


def accept(
    rows: torch.Tensor,  # [N, 8] int32; a row of a slot has a line for each of its tokens
    slots: torch.Tensor,  # [N] int64
    num_drafts: torch.Tensor,  # [N] int64, to be judged at most
    chosen: torch.Tensor,  # [L] int64
    logits: torch.Tensor,  # [L] fp32 of what was chosen; one that is not finite is none
    lengths: torch.Tensor,
    ids: torch.Tensor,
    told: torch.Tensor,  # [N, >= width + 3] int64: the choices, how many are accepted, judged, broken
    width: int,  # most lines of a row
    chunk_len: int,
) -> None:
    """Drafts that are the choices become text, and the next choice follows them (runtime/engine/judge.py)."""
    _accept[(len(slots),)](
        rows, slots, num_drafts, chosen, logits, lengths, ids, told, len(ids), ids.shape[1], chunk_len, width,
        told.stride(0), BLOCK=pow2(width), num_warps=1,
    )  # fmt: skip


def tell(
    slots: torch.Tensor,  # [N] int64
    lengths: torch.Tensor,
    ids: torch.Tensor,
    told: torch.Tensor,  # [N, width + 4 + most] int64: behind `width` + 3 the number of drafts, and they
    width: int,
    most: int,
) -> None:
    """What was proposed for the rows' next steps; what padding rows left in slot 0 is forgotten."""
    num_rows, (num_slots, ids_len) = len(slots), ids.shape
    _tell[(num_rows + cdiv(ids_len, IDS),)](
        slots, lengths, ids, told, num_rows, num_slots, ids_len, width, told.stride(0), most,
        BLOCK=pow2(most), IDS=IDS, num_warps=1,
    )  # fmt: skip
