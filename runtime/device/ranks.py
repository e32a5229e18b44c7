"""Memory that the ranks of an engine share, and what each knows of the others by it.

It is anonymous (a memfd that followers inherit): no name is left behind, whoever ends in whatever way, and
none can be that of an older engine. It holds the leader's records to its followers (ring.py), windows in
which ops exchange (plugins/ranks.py), words of each rank: how far it is, and that it lives; and the
units of all ranks, where prefixes are kept in the host's memory.
"""

import ctypes
import mmap
import os
import secrets
from typing import NamedTuple

import numpy as np
import torch

from hemiola.plugins.ranks import LINE, MOST_RANKS, make_group, window_bytes
from hemiola.runtime.device.host_units import Share
from hemiola.runtime.device.transfer import upload_ints
from hemiola.runtime.errors import Refused

ROOM = 2**21  # bytes of a buffer for exchanges; more goes in pieces
RING = 2**22  # bytes for records; more goes in pieces
# Words, int64. Each rank has a line of its own, behind which stand its digests.
STOP, TOKEN = 0, 1  # not zero: nobody waits any longer; whose memory it is
WRITTEN = 8  # bytes that the leader has put into the ring
RANKS, RANK_WORDS = 16, 64
# bytes read, last step, calls of kernels, heartbeats, moves to and from the host's units
READ, LANDED, CALLS, BEAT, MOVED, DIGESTS = 0, 1, 2, 3, 4, 8
NUM_DIGESTS = 16  # of the last steps that were looked at: number, digest
HEADER = 8 * (RANKS + MOST_RANKS * RANK_WORDS)


class Digest(NamedTuple):
    number: int  # of the step
    value: int


class SharedMemory:
    """Mapped by each rank; `fd` may be inherited."""

    def __init__(self, fd: int, size: int, token: int) -> None:
        """Raises Refused for memory that is not this leader's."""
        if os.fstat(fd).st_size != total_bytes(size):
            message = f"the shared memory is not that of {size} ranks"
            raise Refused("conflict", message=message, way_out="open the engine again")
        self.fd, self.size, self.token = fd, size, token
        self._map = mmap.mmap(fd, total_bytes(size))
        self.words = np.frombuffer(self._map, np.int64, HEADER // 8)
        self.ring = np.frombuffer(self._map, np.uint8, RING, HEADER)
        if self.words[TOKEN] != token:
            message = "the shared memory is another leader's"
            raise Refused("conflict", message=message, way_out="open the engine again")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def make(cls, size: int) -> "SharedMemory":
        """For so many ranks; all of it is zero."""
        fd = os.memfd_create("hemiola-ranks")
        os.ftruncate(fd, total_bytes(size))
        token = secrets.randbits(62)
        os.pwrite(fd, token.to_bytes(8, "little"), 8 * TOKEN)
        return cls(fd, size, token)

    def group(self, rank: int) -> torch.Tensor:
        """What ops of this rank get on a CPU."""
        first, width = self.address + HEADER + RING, window_bytes(ROOM)
        return make_group(rank, [first + n * width for n in range(self.size)], ROOM, self.address)

    def of(self, rank: int) -> np.ndarray:
        """A rank's own words."""
        start = RANKS + rank * RANK_WORDS
        return self.words[start : start + RANK_WORDS]

    def grow(self, unit_bytes: int) -> None:
        """Room for the host's units, before any rank takes its share."""
        os.ftruncate(self.fd, _first_unit(self.size) + unit_bytes)

    def share(self, rank: int) -> Share:
        """A rank's part of the host's units."""
        first = _first_unit(self.size)
        return Share(rank, self.size, lambda num_bytes: mmap.mmap(self.fd, num_bytes, offset=first))

    def stop(self) -> None:
        """Nobody waits for anybody any more."""
        self.words[STOP] = 1

    @property
    def is_stopped(self) -> bool:
        return bool(self.words[STOP])

    def post(self, rank: int, digest: Digest) -> None:
        """For the leader to look at."""
        place = DIGESTS + 2 * (digest.number % NUM_DIGESTS)
        words = self.of(rank)
        words[place] = 0  # who reads meanwhile finds none, or another number behind the value than before it
        words[place + 1] = digest.value
        words[place] = digest.number

    def digests(self, rank: int) -> list[Digest]:
        """The last ones that a rank has posted."""
        words, digests = self.of(rank), []
        for place in range(DIGESTS, DIGESTS + 2 * NUM_DIGESTS, 2):
            digest = Digest(int(words[place]), int(words[place + 1]))
            if digest.number and digest.number == words[place]:
                digests.append(digest)
        return digests

    def moves(self) -> tuple[int, ...]:
        """What changes as long as some rank gets on."""
        windows = range(HEADER + RING, total_bytes(self.size), window_bytes(ROOM))
        posted = (int.from_bytes(self._map[at : at + 8], "little") for at in windows)
        others = (int(self.of(rank)[word]) for rank in range(self.size) for word in (CALLS, LANDED))
        return (*posted, *others)

    def close(self) -> None:
        """Give it back; it goes with the last rank that has it."""
        self.words, self.ring = np.empty(0, np.int64), np.empty(0, np.uint8)
        del self._map  # the last that names it
        os.close(self.fd)


def total_bytes(size: int) -> int:
    assert HEADER % LINE == 0
    return HEADER + RING + size * window_bytes(ROOM)


def _first_unit(size: int) -> int:
    return -(-total_bytes(size) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def digest_of(ids: torch.Tensor, lengths: torch.Tensor, slot_ids: list[int]) -> torch.Tensor:
    """64 bits of what a ledger says of these slots: ids [S, W], lengths [4, S]."""
    slots = upload_ints(ids.device, slot_ids)
    numbers = torch.cat((ids[slots].to(torch.int64), lengths[:, slots].T), 1).flatten()
    places = torch.arange(1, len(numbers) + 1, device=ids.device)
    return ((numbers + 1) * (places * -7046029254386353131)).sum()  # wraps around
