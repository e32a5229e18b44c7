"""Sizes of what ranks exchange on GPUs; plugins/gpu/exchange.py says how."""

from typing import NamedTuple

from hemiola.plugins.gpu.launch import cdiv
from hemiola.plugins.ranks import PROGRAMS

LINES = 1024  # of a program's piece, at most
LINE_BYTES = 16  # in a window: 8 of a message, and a number beside each half
PAYLOAD = 8  # bytes of a message that go in a line
FEW = 256
BLOCK = 2048  # lines of a piece that goes as a block, at most: 8 bytes each, and one number for all
BLOCK_WARPS = 16


class PieceSizes(NamedTuple):
    """How a message is cut: programs, lines of a piece, and warps of a program."""

    programs: int
    lines: int
    warps: int


def window_bytes(size: int) -> int:
    """Of each of so many ranks."""
    return 2 * size * PROGRAMS * (LINES * LINE_BYTES + BLOCK * PAYLOAD + LINE_BYTES)


def pieces_of(num_lines: int) -> PieceSizes:
    """A line for each thread of a small message; of a large one two, so that more are under way."""
    lines, warps = (FEW, FEW // 32) if num_lines <= FEW * PROGRAMS else (LINES, LINES // 64)
    return PieceSizes(min(PROGRAMS, cdiv(num_lines, lines)), lines, warps)


def blocks_of(num_lines: int) -> PieceSizes:
    """Of a message that goes in blocks."""
    return PieceSizes(min(PROGRAMS, cdiv(num_lines, BLOCK)), BLOCK, BLOCK_WARPS)
