"""The best token of each line over all ranks, compiled."""

import torch

from hemiola.plugins.cpu.code import Operand, code_of, complain, numbers
from hemiola.plugins.cpu.exchange import CASES, LOST, buffer, meet, own_buffer, posted
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import get, get_int, get_long, put, put_int, put_long
from hemiola.plugins.ranks import RANK, ROOM, SIZE

PAIR = 16  # bytes: a token, its logit


def agree(
    logit: Operand,  # [L]
    token_id: Operand,  # [L] int64
    group: torch.Tensor,  # [G] int64
    width: int,
) -> tuple[Operand, Operand]:
    """See reference.py."""
    code, num_lines = code_of(logit), logit.shape[0]
    highest, tokens = code.empty(num_lines), code.empty(num_lines, dtype=torch.int64)
    given = (numbers(logit), numbers(token_id), code.given(group))
    code.call(_agree, 1, num_lines * 10.0, num_lines, width, *given, highest, tokens, code.fault(*CASES))
    return highest, tokens


@Kernel
def _agree(item, scratch, num_lines, width, logit, token_id, group, highest, tokens, fault):
    """One item: pieces of as many pairs as a buffer holds."""
    at_once, offset = get_long(group, ROOM) // PAIR, get_long(group, RANK) * width
    for first in range(0, num_lines, at_once):
        count, own = min(at_once, num_lines - first), own_buffer(group)
        for n in range(count):
            put_long(own, 2 * n, get_long(token_id, first + n) + offset)
            put_long(own, 2 * n + 1, get_int(logit, first + n))  # its bits
        if not meet(group):
            complain(fault, LOST, 0, 0)
            return
        number = posted(group) - 1
        for n in range(count):
            found = buffer(group, 0, number)
            put_int(highest, first + n, get_long(found, 2 * n + 1))
            put_long(tokens, first + n, get_long(found, 2 * n))
            for rank in range(1, get_long(group, SIZE)):
                found, known = buffer(group, rank, number), get(highest, first + n)
                value = get(found, 4 * n + 2)
                if known == known and (value > known or value != value):
                    put(highest, first + n, value)
                    put_long(tokens, first + n, get_long(found, 2 * n))
