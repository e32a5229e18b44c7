"""The sum over all ranks, compiled: one thread, since it is memory that is waited for."""

from hemiola.plugins.cpu.code import Operand, code_of, complain, lines, numel
from hemiola.plugins.cpu.exchange import CASES, LOST, NO_ROOM, buffer, meet, own_buffer, posted
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.moves import move
from hemiola.plugins.cpu.simd import LANES, add, get_long, load_some, store_some
from hemiola.plugins.ranks import ROOM, SIZE


def sum(
    x: Operand,  # [T, F]
    group: Operand,  # [G] int64
) -> Operand:  # [T, F]
    """See reference.py."""
    code, x = code_of(x), lines(x)
    y = code.empty(*x.shape)
    fault = code.fault(*CASES)
    code.call(_sum, 1, numel(x) * 0.5, *x.shape, x, x.stride(0), group, y, fault, scratch=4 * LANES)
    return y


@Kernel
def _sum(item, scratch, num_tokens, width, x, x_len, group, y, fault):
    """One item: pieces of as many lines as a buffer holds."""
    room = get_long(group, ROOM)
    if 4 * width > room:
        complain(fault, NO_ROOM, 4 * width, room)
        return
    at_once = room // (4 * width)
    for first in range(0, num_tokens, at_once):
        count, own = min(at_once, num_tokens - first), own_buffer(group)
        for n in range(count):
            move(x, (first + n) * x_len, own, n * width, width)
        if not meet(group):
            complain(fault, LOST, 0, 0)
            return
        _add_up(group, count * width, y + 4 * first * width, scratch)


@helper
def _add_up(group, size, y, scratch):
    """y = the tree of all ranks' `size` numbers."""
    number, ranks = posted(group) - 1, get_long(group, SIZE)
    for i in range(0, size, LANES):
        store_some(y, i, size - i, _tree(group, 0, ranks, number, i, size - i, scratch), scratch)


@helper
def _pair(group, first, number, i, count, scratch):
    """The sum of two ranks."""
    a = load_some(buffer(group, first, number), i, count, scratch)
    return add(a, load_some(buffer(group, first + 1, number), i, count, scratch))


@helper
def _four(group, first, number, i, count, scratch):
    a = _pair(group, first, number, i, count, scratch)
    return add(a, _pair(group, first + 2, number, i, count, scratch))


@helper
def _tree(group, first, ranks, number, i, count, scratch):
    if ranks == 1:
        return load_some(buffer(group, first, number), i, count, scratch)
    if ranks == 2:
        return _pair(group, first, number, i, count, scratch)
    if ranks == 4:
        return _four(group, first, number, i, count, scratch)
    a = _four(group, first, number, i, count, scratch)
    return add(a, _four(group, first + 4, number, i, count, scratch))
