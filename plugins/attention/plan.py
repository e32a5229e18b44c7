"""Where the tokens of a step go and which pages are read together: integers, the same for all layers."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

GROUP_BYTES = 1 << 23  # keys and values of several rows read together: they should stay in cache
PADDING_BYTES = 1 << 18  # and a row's padding in them: copying it costs about as much as one group more


class Row(NamedTuple):
    """One row of the step that holds tokens."""

    row: int
    start: int  # its first token of the step
    num_tokens: int
    kv_len: int  # keys that its last token sees


class Form(NamedTuple):
    """What the attention that follows can take."""

    short_len: int  # rows of up to this many tokens may be read together
    stacked: bool  # only with rows of as many tokens: their queries are stacked
    split_len: int  # room for keys is a multiple of this
    num_copies: int  # query heads per key head
    token_bytes: int  # a token's key and value as read
    first: int  # keys before this place are not seen


class Group(NamedTuple):
    """One row, or several whose keys are read together, padded to the longest, which comes first."""

    rows: list[Row]
    room: int  # keys per row, S
    page_ids: torch.Tensor  # [n * pages per row] int64
    first_page: int  # where the pages of a single row follow each other and all room is used, else -1
    empty: torch.Tensor  # [...] int64: places among the read keys that hold none
    tokens: torch.Tensor  # [n * num_tokens] int64, if stacked
    bias: (
        torch.Tensor | None
    )  # [n, 1, num_tokens * H/G, S] -inf at keys not seen, if stacked and there are any


class Plan(NamedTuple):
    """The step."""

    slots: torch.Tensor  # [T] int64: page_id * page_len + place, where a token's key is written
    groups: list[Group]


@lru_cache(maxsize=4)  # trunk and draft of one step
def plan_step(
    cu_tokens: bytes,  # [N + 1] int32
    positions: bytes,  # [T] int32
    page_table: bytes,  # [N, W] int32
    page_len: int,
    form: Form,
) -> Plan:
    """Rows of at most form.short_len tokens in groups, every other row alone."""
    cu = np.frombuffer(cu_tokens, np.int32).tolist()
    place = np.frombuffer(positions, np.int32)
    table = np.frombuffer(page_table, np.int32).reshape(len(cu) - 1, -1)
    row_of_token = np.repeat(np.arange(len(cu) - 1), np.diff(cu))
    slots = table[row_of_token, place // page_len].astype(np.int64) * page_len + place % page_len
    rows = list_rows(cu, place)
    groups = group_rows([row for row in rows if row.num_tokens <= form.short_len], form)
    groups += [[row] for row in rows if row.num_tokens > form.short_len]
    planned = [plan_group(group, table, place, page_len, form) for group in groups]
    return Plan(torch.from_numpy(slots), planned)


def list_rows(cu_tokens: list[int], positions: np.ndarray) -> list[Row]:
    """The rows that hold tokens."""
    filled = [row for row in range(len(cu_tokens) - 1) if cu_tokens[row + 1] > cu_tokens[row]]
    if not filled:
        return []
    starts = [cu_tokens[row] for row in filled]
    highest = np.maximum.reduceat(positions, starts).tolist()
    return [
        Row(row, start, cu_tokens[row + 1] - start, last + 1)
        for row, start, last in zip(filled, starts, highest, strict=True)
    ]


def group_rows(rows: list[Row], form: Form) -> list[list[Row]]:
    """Rows of like length together, longest first."""
    groups: list[list[Row]] = []
    head = None
    for row in sorted(rows, key=lambda r: (form.stacked * r.num_tokens, r.kv_len), reverse=True):
        if (
            head is None
            or (form.stacked and row.num_tokens != head.num_tokens)
            or (head.kv_len - row.kv_len) * form.token_bytes > PADDING_BYTES
            or (len(groups[-1]) + 1) * head.kv_len * form.token_bytes > GROUP_BYTES
        ):
            groups.append([])
            head = row
        groups[-1].append(row)
    return groups


def plan_group(
    rows: list[Row], page_table: np.ndarray, positions: np.ndarray, page_len: int, form: Form
) -> Group:
    """Which pages to read, and what of them to ignore: entries of the table behind a row's keys are stale."""
    room = -(-rows[0].kv_len // form.split_len) * form.split_len
    num_pages = -(-room // page_len)
    page_ids = np.zeros((len(rows), num_pages), np.int64)
    width = min(num_pages, page_table.shape[1])
    page_ids[:, :width] = page_table[[row.row for row in rows], :width]
    kv_lens = np.array([[row.kv_len] for row in rows])
    page_ids *= np.arange(0, num_pages * page_len, page_len) < kv_lens
    first_page = int(page_ids[0, 0])
    run = first_page + np.arange(num_pages)
    if form.first or len(rows) > 1 or rows[0].kv_len < room or not np.array_equal(page_ids[0], run):
        first_page = -1
    place = np.arange(num_pages * page_len)
    empty = (place >= kv_lens) | (place < form.first)
    empty[:, room:] = False  # cut off when read
    tokens, bias = np.zeros(0, np.int64), None
    if form.stacked and rows[0].num_tokens <= form.short_len:
        tokens = np.array([[row.start] for row in rows]) + np.arange(rows[0].num_tokens)
        visible = place[:room] <= positions[tokens][:, :, None]
        visible &= place[:room] >= form.first
        bias = np.where(visible, np.float32(0), np.float32("-inf")).repeat(form.num_copies, 1)
        bias = None if visible.all() else torch.from_numpy(bias[:, None])
    return Group(
        rows=rows,
        room=room,
        page_ids=torch.from_numpy(page_ids.ravel()),
        first_page=first_page,
        empty=torch.from_numpy(np.flatnonzero(empty)),
        tokens=torch.from_numpy(tokens.ravel()),
        bias=bias,
    )
