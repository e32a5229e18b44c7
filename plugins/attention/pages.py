"""Pages as torch sees them on a CPU: write tokens, gather the keys and values of rows that run together."""

from typing import NamedTuple

import numpy as np
import torch

WASTE_BYTES = 1 << 18  # copying this much padding costs about as much as one more group of rows


class Row(NamedTuple):
    """One row of the step that holds tokens."""

    row: int
    start: int  # its first token of the step
    num_tokens: int
    kv_len: int  # keys that its last token sees


def list_rows(cu_tokens: list[int], positions: np.ndarray) -> list[Row]:
    """The rows that hold tokens."""
    filled = [row for row in range(len(cu_tokens) - 1) if cu_tokens[row + 1] > cu_tokens[row]]
    if not filled:
        return []
    starts = [cu_tokens[row] for row in filled]
    kv_lens = (np.maximum.reduceat(positions, starts) + 1).tolist()
    return [
        Row(row, start, cu_tokens[row + 1] - start, kv_len)
        for row, start, kv_len in zip(filled, starts, kv_lens, strict=True)
    ]


def write(
    pages: torch.Tensor,  # [Z, page_len, G, D]
    slots: torch.Tensor,  # [T] int64: page * page_len + place in the page
    values: torch.Tensor,  # [T, G, D]
) -> None:
    """Put every token's values at its place."""
    pages.view(-1, *values.shape[1:]).index_copy_(0, slots, values.to(pages.dtype))


def token_slots(
    page_table: np.ndarray,  # [N, W]
    cu_tokens: list[int],
    positions: np.ndarray,  # [T]
    page_len: int,
) -> torch.Tensor:  # [T] int64
    """Where every token of the step belongs."""
    row_of_token = np.repeat(np.arange(len(cu_tokens) - 1), np.diff(cu_tokens))
    page, place = np.divmod(positions, page_len)
    return torch.from_numpy(page_table[row_of_token, page].astype(np.int64) * page_len + place)


def group_rows(rows: list[Row], token_bytes: int, same_tokens: bool) -> list[list[Row]]:
    """Rows to gather together, longest first: little padding, and equal token counts if `same_tokens`."""
    groups: list[list[Row]] = []
    head: Row | None = None
    for row in sorted(rows, key=lambda r: (r.num_tokens if same_tokens else 0, r.kv_len), reverse=True):
        if (
            head is None
            or (same_tokens and row.num_tokens != head.num_tokens)
            or (head.kv_len - row.kv_len) * token_bytes > WASTE_BYTES
        ):
            groups.append([])
            head = row
        groups[-1].append(row)
    return groups


class Gather:
    """The pages of some rows as one index: which pages to copy, and which places of the copy hold no key."""

    def __init__(self, rows: list[Row], page_table: np.ndarray, page_len: int, multiple: int) -> None:
        """Room for the longest row's keys, rounded up to a multiple of `multiple`."""
        room = -(-rows[0].kv_len // multiple) * multiple
        self.room = room
        num_pages = -(-room // page_len)
        kv_lens = np.array([row.kv_len for row in rows])
        needed = -(-kv_lens // page_len)
        ids = np.zeros((len(rows), num_pages), np.int64)
        width = min(num_pages, page_table.shape[1])
        ids[:, :width] = page_table[[row.row for row in rows], :width]
        ids[np.arange(num_pages) >= needed[:, None]] = 0
        self.ids = torch.from_numpy(ids.ravel())
        empty = np.arange(num_pages * page_len) >= kv_lens[:, None]
        self.empty = torch.from_numpy(np.flatnonzero(empty))
        self.num_rows = len(rows)

    def copy(self, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[rows, room, G, D], zero where there is no key: other requests' or poisoned values never get in."""
        found = pages.index_select(0, self.ids).to(dtype).flatten(0, 1)
        found.index_fill_(0, self.empty, 0)
        return found.view(self.num_rows, -1, *found.shape[1:])[:, : self.room]
