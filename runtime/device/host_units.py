"""Units of the host's memory, and copies of pages and slots to and from them.

Copies run in the order of the calls, beside the engine's steps (lane.py); the host waits for none. What is
saved is gathered on the device at once, so that the next step may overwrite it. What is loaded is there
behind a mark, for which the steps that read it are held. A page, or a slot, is the bytes of all its states,
one tensor behind the other.

Ranks of an engine map the same units: in each, one behind the other, is what every rank has of a page.
"""

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from hemiola.runtime.device.lane import Lane, Mark
from hemiola.runtime.device.lines import StateLines
from hemiola.runtime.device.pinned import lock, unlock
from hemiola.runtime.device.transfer import upload_ints
from hemiola.runtime.processes import only_here

AT_ONCE = 2**27  # bytes of the device that a copy may take in between
MAX_LEAVING = 2**29  # bytes of the device that wait to be copied; beyond that, steps wait for them
SHARE = 1024  # of a device's memory one of so many parts for a copy in between, and four for what is leaving


class Share(NamedTuple):
    """A rank's part of each unit."""

    rank: int
    size: int  # ranks
    map: Callable[[int], mmap.mmap]  # the memory of all units, of so many bytes


ALL = Share(0, 1, lambda num_bytes: mmap.mmap(-1, num_bytes))  # shared: a fork moves no page


class HostUnits:
    """num_units of the bytes of a page each; on a GPU's host they are page-locked."""

    def __init__(
        self,
        pages: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
        num_bytes: int,
        device: torch.device,
        share: Share = ALL,
    ) -> None:
        self._pages, self._slots = StateLines(pages), StateLines(slots)
        self._device, self._lane = device, Lane(device)
        self._leaving: deque[tuple[Mark, torch.Tensor]] = deque()  # gathered, and being copied
        self._marks: dict[int, Mark] = {}  # of loads for which no step was held yet
        self._num_marks = 0
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**63
        self._at_once = min(AT_ONCE, memory // SHARE)
        self._most_leaving = min(MAX_LEAVING, 4 * memory // SHARE)
        self._own_bytes = self._pages.width  # this rank's, of a unit
        self.unit_bytes = share.size * self._own_bytes
        self.num_units = num_bytes // self.unit_bytes
        self.units_per_slot = -(-self._slots.width // self._own_bytes)
        self._memory = share.map(self.num_units * self.unit_bytes)
        numbers = np.frombuffer(self._memory, np.uint8).reshape(self.num_units, self.unit_bytes)
        self._address = numbers.ctypes.data
        if device.type == "cuda":
            lock(self._address, numbers.nbytes)
            self._unlock = weakref.finalize(self, only_here(unlock), self._address)  # before the memory goes
        units = torch.from_numpy(numbers).view(self.num_units, share.size, self._own_bytes)
        self._numbers, self._units = numbers, units[:, share.rank]

    def close(self) -> None:
        """Give the memory back, behind all copies."""
        self.settled()()
        self._leaving.clear()
        if self._device.type == "cuda":
            self._unlock()
        self._pages, self._slots = StateLines([]), StateLines([])
        self._units = torch.empty(0, 0, dtype=torch.uint8)
        self._numbers = self._units.numpy()
        del self._memory

    def save_pages(self, page_ids: Sequence[int], units: Sequence[int]) -> None:
        for some_pages, some_units in self._parts(page_ids, units):
            self._save(self._pages.gather(upload_ints(self._device, some_pages)), some_units)

    def load_pages(self, units: Sequence[int], page_ids: Sequence[int]) -> None:
        for some_pages, some_units in self._parts(page_ids, units):
            place = partial(self._place_pages, some_pages)
            self._lane.load(partial(self._bring, some_units), place)

    def save_slot(self, slot_id: int, units: Sequence[int]) -> None:
        room = torch.empty(len(units), self._own_bytes, dtype=torch.uint8, device=self._device)
        self._slots.copy_from(slot_id, room.view(-1))
        self._save(room, units)

    def load_slot(self, units: Sequence[int], slot_id: int) -> None:
        def place(content: torch.Tensor) -> None:
            self._slots.copy_to(slot_id, content.view(-1))

        self._lane.load(partial(self._bring, units), place)

    def mark(self) -> int:
        """A number for what was loaded so far, which `hold` takes once."""
        self._let_go()
        self._num_marks += 1
        self._marks[self._num_marks] = self._lane.mark()
        return self._num_marks

    def has_come(self, number: int) -> bool:
        """Whether what was loaded before this mark is there."""
        return self._marks[number].passed()

    def hold(self, number: int) -> None:
        """Let the steps that are launched from now on run behind it."""
        self._lane.hold(self._marks.pop(number))

    # For the file: of all ranks.

    def get(self, unit: int) -> memoryview:
        return self._numbers[unit].data

    def fill(self, unit: int, read: Callable[[memoryview], bool]) -> bool:
        return read(self._numbers[unit].data)

    def settled(self) -> Callable[[], None]:
        """A function that waits until all copies to and from units that were begun so far are done."""
        return self._lane.mark().wait

    def _parts(
        self, page_ids: Sequence[int], units: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        at_once = max(1, self._at_once // self._own_bytes)
        for first in range(0, len(page_ids), at_once):
            yield page_ids[first : first + at_once], units[first : first + at_once]

    def _save(self, content: torch.Tensor, units: Sequence[int]) -> None:
        """content: [len(units), bytes of a page] on the device."""
        self._lane.do(partial(self._copy_out, content, units))
        self._leaving.append((self._lane.mark(), content))
        self._let_go()

    def _let_go(self) -> None:
        """Of what has been copied, and of what is more than the device has for it."""
        while self._leaving and (self._leaving[0][0].passed() or self._leaving_bytes > self._most_leaving):
            mark, _ = self._leaving.popleft()
            self._lane.hold(mark)  # its memory is used again by steps

    @property
    def _leaving_bytes(self) -> int:
        return sum(content.nbytes for _, content in self._leaving)

    def _copy_out(self, content: torch.Tensor, units: Sequence[int]) -> None:
        for first, last, unit in _runs(units):
            self._units[unit : unit + last - first].copy_(content[first:last], non_blocking=True)

    def _bring(self, units: Sequence[int]) -> torch.Tensor:
        """[len(units), bytes of a page] on the device."""
        content = torch.empty(len(units), self._own_bytes, dtype=torch.uint8, device=self._device)
        for first, last, unit in _runs(units):
            content[first:last].copy_(self._units[unit : unit + last - first], non_blocking=True)
        return content

    def _place_pages(self, page_ids: Sequence[int], content: torch.Tensor) -> None:
        self._pages.scatter(content, upload_ints(self._device, page_ids))


def _runs(units: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbours that are copied in one go: first and end in `units`, and the first unit."""
    first = 0
    for at in range(1, len(units) + 1):
        if at == len(units) or units[at] != units[at - 1] + 1:
            yield first, at, units[first]
            first = at
