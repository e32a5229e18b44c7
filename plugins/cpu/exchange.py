"""What compiled ops of ranks share: posting a piece, waiting for the others', and where these lie
(plugins/ranks.py)."""

from hemiola.plugins.cpu.atomics import acquire, pause, release, usleep
from hemiola.plugins.cpu.code import Case
from hemiola.plugins.cpu.jit import helper
from hemiola.plugins.cpu.simd import get_long
from hemiola.plugins.ranks import LINE, RANK, ROOM, SIZE, STOP, STOPPED, WINDOWS

SPINS, NAP = 300, 20  # looks at a word, some 10 microseconds; then microseconds asleep: ranks may share cores
CASES = (Case(RuntimeError, STOPPED), Case(ValueError, "a line of {0} bytes in a rank's buffer of {1}"))
LOST, NO_ROOM = 1, 2  # of CASES


@helper
def buffer(group, rank, number):
    """Where a rank has the piece of this number."""
    return get_long(group, WINDOWS + rank) + LINE + number % 2 * get_long(group, ROOM)


@helper
def posted(group):
    """How many pieces this rank has posted."""
    return get_long(get_long(group, WINDOWS + get_long(group, RANK)), 0)


@helper
def own_buffer(group):
    """Where this rank puts its next piece."""
    return buffer(group, get_long(group, RANK), posted(group))


@helper
def meet(group):
    """Post the piece in this rank's buffer, and wait for all ranks'; whether they have come."""
    number = posted(group) + 1
    release(get_long(group, WINDOWS + get_long(group, RANK)), 0, number)
    for rank in range(get_long(group, SIZE)):
        window, turn = get_long(group, WINDOWS + rank), 0
        while acquire(window, 0) < number:
            if turn < SPINS:
                pause()
            else:
                usleep(NAP)
            turn += 1
            if turn % 100 == 0 and acquire(get_long(group, STOP), 0) != 0:
                return False
    return True
