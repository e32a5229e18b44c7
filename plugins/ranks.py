"""Ranks: processes that run one program on parts of its weights, and the memory in which they exchange.

Ops that exchange get `group` [G] int64, a tensor of the rank's own: who it is, and where each rank's
window lies as this rank's device addresses it. On a CPU a window is shared memory: the number of pieces that
its rank has posted, and two buffers. A message is lines of one width. It goes in pieces of as many lines as a
buffer holds: each rank copies a piece to its buffer, posts it, waits until all ranks have posted theirs, and
reads all buffers. Pieces take turns in the two buffers: who posts piece n + 1 has read all of piece n, so
the buffer that it then fills is one that nobody reads. A GPU's windows: plugins/gpu/exchange.py.

Waiting ends early when the word at STOP is not zero: the engine has lost a rank.
"""

import ctypes
import time

import torch

RANK, SIZE, ROOM, STOP, WINDOWS = 0, 1, 2, 3, 8
MOST_RANKS = 8
PROGRAMS = 128  # of a GPU's kernel; the last words of a group are how many pieces each has exchanged
LINE = 64  # bytes of a cache line: what one rank writes begins on its own
STOPPED = "the engine has lost a rank"


def window_bytes(room: int) -> int:
    """Of one rank, with two buffers of so many bytes."""
    return LINE + 2 * room


def words_of(size: int) -> int:
    """G of `group`, for so many ranks."""
    return WINDOWS + size + PROGRAMS


def size_of(group: torch.Tensor) -> int:
    """How many ranks there are, without a look into a GPU's memory."""
    return group.shape[0] - WINDOWS - PROGRAMS


def lines_of_a_piece(room: int, line_bytes: int) -> int:
    """Raises ValueError where a buffer holds no line."""
    if line_bytes > room:
        raise ValueError(f"a line of {line_bytes} bytes in a rank's buffer of {room}")
    return room // max(line_bytes, 1)


def make_group(rank: int, windows: list[int], room: int, stop: int) -> torch.Tensor:
    """windows: the address of each rank's; stop: of the word that ends all waiting."""
    assert MOST_RANKS % len(windows) == 0 and room % LINE == 0
    group = torch.zeros(words_of(len(windows)), dtype=torch.int64)
    group[: WINDOWS + len(windows)] = torch.tensor([rank, len(windows), room, stop, 0, 0, 0, 0, *windows])
    return group


def exchange(group: torch.Tensor, lines: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' lines [T, F], in the order of the ranks: the truth of what compiled forms do."""
    rank, size, room, stop, *_ = group.tolist()
    windows = group.tolist()[WINDOWS : WINDOWS + size]
    own, found = lines.contiguous(), [torch.empty_like(lines) for _ in range(size)]
    line_bytes = own.shape[1] * own.itemsize
    at_once = lines_of_a_piece(room, line_bytes)
    for first in range(0, len(own), at_once):
        number = ctypes.c_int64.from_address(windows[rank]).value
        num_bytes = min(at_once, len(own) - first) * line_bytes
        at = LINE + number % 2 * room
        ctypes.memmove(windows[rank] + at, own.data_ptr() + first * line_bytes, num_bytes)
        ctypes.c_int64.from_address(windows[rank]).value = number + 1
        for window, there in zip(windows, found, strict=True):
            while ctypes.c_int64.from_address(window).value <= number:
                if ctypes.c_int64.from_address(stop).value:
                    raise RuntimeError(STOPPED)
                time.sleep(1e-5)
            ctypes.memmove(there.data_ptr() + first * line_bytes, window + at, num_bytes)
    return found
