"""The logits of all ranks side by side, compiled."""

import torch

from hemiola.plugins.cpu.code import EAGER, complain, lines
from hemiola.plugins.cpu.exchange import CASES, LOST, NO_ROOM, buffer, meet, own_buffer, posted
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.moves import move
from hemiola.plugins.cpu.simd import get_long
from hemiola.plugins.ranks import ROOM, SIZE


def gather(
    logits: torch.Tensor,  # [L, V]
    group: torch.Tensor,  # [G] int64
) -> torch.Tensor:
    """See reference.py. Steps of recorded code choose by pairs and need no logits of others."""
    logits, size = lines(logits), int(group[SIZE])
    (num_lines, width), fault = logits.shape, EAGER.fault(*CASES)
    y = EAGER.empty(num_lines, width * size)
    EAGER.call(_gather, 1, 0.5 * y.numel(), num_lines, width, logits, logits.stride(0), group, y, fault)
    return y


@Kernel
def _gather(item, scratch, num_lines, width, logits, line_len, group, y, fault):
    """One item: pieces of as many lines as a buffer holds."""
    room, size = get_long(group, ROOM), get_long(group, SIZE)
    if 4 * width > room:
        complain(fault, NO_ROOM, 4 * width, room)
        return
    at_once = room // (4 * width)
    for first in range(0, num_lines, at_once):
        count, own = min(at_once, num_lines - first), own_buffer(group)
        for n in range(count):
            move(logits, (first + n) * line_len, own, n * width, width)
        if not meet(group):
            complain(fault, LOST, 0, 0)
            return
        number = posted(group) - 1
        for rank in range(size):
            found = buffer(group, rank, number)
            for n in range(count):
                move(found, n * width, y, ((first + n) * size + rank) * width, width)
