"""The threads that share a step's kernels: made once, asleep between steps.

One thread, the master, runs a step's list of calls. A call that is worth it is opened to the helpers: every
item of it is taken by exactly one thread, and the master goes on when all are done. A helper that comes late,
since the machine is busy, finds nothing open: nobody waits for a thread that does nothing.

Which call is open stands in one word: a serial number, and the next item. An item is taken by exchanging that
word, so that a helper that slept through anything can take nothing of what it does not know.
"""

import atexit
import ctypes
import os
import threading
from contextlib import suppress
from math import ceil
from pathlib import Path

import torch

from hemiola.plugins.cpu import cgroups
from hemiola.plugins.cpu.atomics import (
    acquire,
    count_up,
    exchange,
    pause,
    release,
    sched_yield,
    sem_post,
    sem_wait,
)
from hemiola.plugins.cpu.jit import CFunction, helper
from hemiola.plugins.cpu.simd import get_long, invoke, put_long

# Words of a team's memory; what different threads write lies in lines of its own.
OPEN, DONE, EPOCH, STEP = 0, 8, 16, 24  # STEP: whether one runs, its threads, whether helpers shall end
RUNNING, THREADS, ENDING = STEP, STEP + 1, STEP + 2
CALL, NUM_ITEMS = 32, 33  # of what is open
MEMBERS, MEMBER_WORDS = 40, 8  # a thread's own: its scratch memory, whether it sleeps, its semaphore
SCRATCH, ASLEEP, SEMAPHORE = 0, 1, 2  # the last has the room of four words
MOST_THREADS = 256
NEXT = 2**32 - 1  # the part of OPEN that counts items
CLOSED = 2**31
# Words of a call (steps.py): the kernel, its items, nanoseconds, scratch bytes, a fault's address, arguments.
KERNEL, ITEMS, COST, FAULT, ARGUMENTS = 0, 1, 2, 3, 4
SPINS = 2_000  # looks at a word before others may have the core, some 20 to 50 microseconds


@helper
def _wait_a_moment(spins):
    """Called again and again with what it returned."""
    pause()
    if spins == 0:
        sched_yield()
        return SPINS
    return spins - 1


@helper
def _take(team, member):
    """Do items of the call that is open, until none is left; whether there was one."""
    any_ = False
    while True:
        found = acquire(team, OPEN)
        item = found & NEXT
        if item >= get_long(team, NUM_ITEMS):  # closed, too
            return any_
        if exchange(team, OPEN, found, found + 1):
            call = get_long(team, CALL)
            invoke(get_long(call, KERNEL), item, get_long(member, SCRATCH), call + 8 * ARGUMENTS)
            count_up(team, DONE)
            any_ = True


@helper
def share(team, call, num_items):
    """The master: all items of a call, with whatever helpers are awake."""
    serial = ((acquire(team, OPEN) >> 32) + 1) << 32
    release(team, OPEN, serial + CLOSED)  # nothing can be taken while the call changes
    put_long(team, CALL, call)
    put_long(team, DONE, 0)
    release(team, NUM_ITEMS, num_items)
    release(team, OPEN, serial)
    _take(team, team + 8 * MEMBERS)
    spins = SPINS
    while acquire(team, DONE) < num_items:
        spins = _wait_a_moment(spins)
    release(team, OPEN, serial + CLOSED)


@helper
def alone(team, call, num_items):
    """The master: all items of a call by itself."""
    scratch = get_long(team + 8 * MEMBERS, SCRATCH)
    for item in range(num_items):
        invoke(get_long(call, KERNEL), item, scratch, call + 8 * ARGUMENTS)


@helper
def call_up(team, num_threads):
    """A step begins: wake the helpers that it may have."""
    release(team, THREADS, num_threads)
    release(team, RUNNING, 1)
    count_up(team, EPOCH)
    for n in range(1, num_threads):
        member = team + 8 * (MEMBERS + n * MEMBER_WORDS)
        if exchange(member, ASLEEP, 1, 0):
            sem_post(member + 8 * SEMAPHORE)


@helper
def dismiss(team):
    """A step has ended."""
    release(team, RUNNING, 0)


@CFunction
def _help(team, number):
    """A helper's life: sleep, and take part in steps that want so many threads."""
    member, seen = team + 8 * (MEMBERS + number * MEMBER_WORDS), 0
    while True:
        spins = SPINS
        while acquire(team, EPOCH) == seen:
            spins = spins - 1
            pause()
            if spins == 0:
                _sleep(team, member, seen)
                spins = SPINS
        seen = acquire(team, EPOCH)
        if acquire(team, ENDING) != 0:
            return
        spins = SPINS
        while acquire(team, RUNNING) != 0 and number < acquire(team, THREADS):
            spins = SPINS if _take(team, member) else _wait_a_moment(spins)


@helper
def _sleep(team, member, seen):
    """Until a step begins after the one that was seen."""
    exchange(member, ASLEEP, 0, 1)
    if not exchange(team, EPOCH, seen, seen) and exchange(member, ASLEEP, 1, 0):
        return  # it began meanwhile, and nobody will wake us
    while sem_wait(member + 8 * SEMAPHORE) != 0:
        pass  # a signal woke us


@CFunction
def _wake(team, num_threads):
    """Let all helpers see that they shall end."""
    call_up(team, num_threads)
    dismiss(team)


class Team:
    """Memory of its own, and helpers; with any it is never freed, since they may look at it at any time.

    `most`: threads that it ever has.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.lock = threading.Lock()  # of whoever is the master
        size = 8 * (MEMBERS + MOST_THREADS * MEMBER_WORDS)
        self._memory = torch.zeros(size + 64, dtype=torch.uint8)
        self.address = self._memory.data_ptr() + -self._memory.data_ptr() % 64
        self._words = (ctypes.c_int64 * (size // 8)).from_address(self.address)
        self._words[OPEN] = CLOSED
        for n in range(MOST_THREADS):
            ctypes.CDLL(None).sem_init(
                ctypes.c_void_p(self.address + 8 * (MEMBERS + n * MEMBER_WORDS + SEMAPHORE)), 0, 0
            )
        self._rooms: list[torch.Tensor] = []  # scratch memory by thread
        self._room = -1  # bytes of each
        self._helpers: list[threading.Thread] = []

    def prepare(self, num_threads: int, scratch: int) -> None:
        """By the master, between steps: at least so many threads, each with so many bytes."""
        if scratch > self._room or num_threads > len(self._rooms):
            self._room = max(self._room, scratch)
            self._rooms = [torch.empty(self._room + 64, dtype=torch.uint8) for _ in range(num_threads)]
            for n, room in enumerate(self._rooms):
                at = MEMBERS + n * MEMBER_WORDS + SCRATCH
                self._words[at] = room.data_ptr() + -room.data_ptr() % 64
        while len(self._helpers) < num_threads - 1:
            number = len(self._helpers) + 1
            if number == 1:
                _KEPT.append(self._memory)
            thread = threading.Thread(
                target=_help.ctypes, args=(self.address, number), name=f"hemiola-helper-{number}", daemon=True
            )
            thread.start()
            self._helpers.append(thread)

    def end(self) -> None:
        """No helper runs when the interpreter takes down what they stand on."""
        with self.lock:
            self._words[ENDING] = 1
            _wake.ctypes(self.address, len(self._helpers) + 1)
            for thread in self._helpers:
                thread.join()
            self._helpers = []


class Crew:
    """A team whose master the caller is meanwhile, and how many threads it has.

    The process has one team with helpers. Whoever comes while it is busy, as a second engine does, works
    alone: the cores are busy then. A forked child, which has no helpers, makes its own.
    """

    def __init__(self, num_threads: int, scratch: int) -> None:
        self.num_threads, self._scratch = num_threads, scratch

    def __enter__(self) -> "Crew":
        global _TEAM
        if self.num_threads > 1:
            if _TEAM is None:
                _TEAM = Team(quota())
                atexit.register(_TEAM.end)
            if _TEAM.lock.acquire(blocking=False):
                self.team, self.num_threads = _TEAM, min(self.num_threads, _TEAM.most)
                try:
                    _TEAM.prepare(self.num_threads, self._scratch)
                except BaseException:
                    _TEAM.lock.release()
                    raise
                return self
            self.num_threads = 1
        if _LOCAL.team is None:
            _LOCAL.team = Team(1)
        self.team = _LOCAL.team
        self.team.prepare(1, self._scratch)
        return self

    def __exit__(self, *_: object) -> None:
        if self.team is not _LOCAL.team:
            self.team.lock.release()


def quota(root: Path = cgroups.ROOT, own: Path = cgroups.OWN) -> int:
    """As many threads as we may have cores, by affinity and by the time of our control groups, rounded up."""
    shares = [float(MOST_THREADS), float(len(os.sched_getaffinity(0)))]
    for folder in cgroups.folders("cpu", root, own):
        with suppress(OSError, ValueError):
            part, whole = (folder / "cpu.max").read_text().split()
            shares.append(float(part) / float(whole))  # "max" is no number
        with suppress(OSError, ValueError):
            part, whole = (float((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if part > 0:
                shares.append(part / whole)
    return max(1, ceil(min(shares)))


def usual_threads() -> int:
    """As many as torch has; in a forked child, as it had before."""
    return max(torch.get_num_threads(), _INHERITED)


def _forked() -> None:
    """All other threads are lost. The team's lock stays held if one of them was its master.

    torch's next loop over many elements would wait for its own for ever.
    """
    global _TEAM, _INHERITED
    if _TEAM is not None:
        atexit.unregister(_TEAM.end)
    _TEAM, _INHERITED = None, usual_threads()
    torch.set_num_threads(1)


class _Local(threading.local):
    team: Team | None = None  # of a thread that works alone


_LOCAL = _Local()
_KEPT: list[torch.Tensor] = []
_TEAM: Team | None = None
_INHERITED = 1
os.register_at_fork(after_in_child=_forked)
