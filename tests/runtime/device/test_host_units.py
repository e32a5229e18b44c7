"""Pages and slots come back from the host as they were, and nothing else is touched."""

from collections.abc import Callable

import pytest
import torch

from hemiola.runtime.device import host_units
from hemiola.runtime.device.host_units import HostUnits
from hemiola.runtime.device.lane import Lane, Mark

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def states(device: str, count: int, *shapes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape, dtype in shapes:
        numbers = torch.randint(
            0, 256, (count, *shape, dtype.itemsize), dtype=torch.uint8, generator=generator
        )
        made.append(numbers.view(dtype).squeeze(-1).to(device))
    return made


def as_bytes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.cpu().contiguous().view(torch.uint8).clone() for tensor in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at_once", [1, 2**25])
@pytest.mark.parametrize(("odd", "page_bytes"), [(7, 30 + 7 + 16), (2, 30 + 2 + 16)])
def test_what_was_saved_is_loaded(
    monkeypatch: pytest.MonkeyPatch, device: str, at_once: int, odd: int, page_bytes: int
) -> None:
    """By bytes, by words (slots of 192 bytes), and by both (pages of 48)."""
    monkeypatch.setattr(host_units, "AT_ONCE", at_once)
    pages = states(device, 9, ((3, 5), torch.bfloat16), ((odd,), torch.uint8), ((2, 2), torch.float32))
    last = 8 if odd == 2 else odd
    slots = states(device, 4, ((11, 4), torch.float32), ((2, odd - 1), torch.int32), ((last,), torch.uint8))
    before_pages, before_slots = as_bytes(pages), as_bytes(slots)
    slot_bytes = 176 + 8 * (odd - 1) + last
    units = HostUnits(pages, slots, 12 * page_bytes + 5, torch.device(device))
    assert (units.num_units, units.units_per_slot) == (12, -(-slot_bytes // page_bytes))
    units.save_pages([2, 8, 5], [4, 3, 11])
    units.save_slot(3, [0, 7, 8, 9, 10])
    for tensor in (*pages, *slots):
        tensor.view(torch.uint8).fill_(0)
    units.load_pages([11, 4, 3], [1, 2, 3])
    units.load_slot([0, 7, 8, 9, 10], 1)
    units.hold(units.mark())
    for before, now in zip(before_pages, as_bytes(pages), strict=True):
        assert [bool((now[n] == before[m]).all()) for n, m in ((1, 5), (2, 2), (3, 8))] == [True] * 3
        assert not now[4:].any() and not now[0].any()
    for before, now in zip(before_slots, as_bytes(slots), strict=True):
        assert (now[1] == before[3]).all() and not now[2:].any() and not now[0].any()
    units.close()


class LateMark(Mark):
    def __init__(self, lane: "LateLane", end: int) -> None:
        self.lane, self.end = lane, end

    def passed(self) -> bool:
        return self.end <= self.lane.num_done

    def wait(self) -> None:
        self.lane.run(self.end)


class LateLane(Lane):
    """Copies as late as they may come: when somebody waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.copies: list[Callable[[], None]] = []
        self.num_done = 0

    def do(self, copy: Callable[[], None]) -> None:
        self.copies.append(copy)

    def load(self, bring: Callable[[], torch.Tensor], place: Callable[[torch.Tensor], None]) -> None:
        self.copies.append(lambda: place(bring()))

    def mark(self) -> Mark:
        return LateMark(self, len(self.copies))

    def hold(self, mark: Mark) -> None:
        mark.wait()

    def run(self, end: int) -> None:
        while self.num_done < end:
            self.copies[self.num_done]()
            self.num_done += 1


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> tuple[HostUnits, list[torch.Tensor], list[torch.Tensor]]:
    """Units whose copies are late, their pages and their slots."""
    monkeypatch.setattr(host_units, "Lane", LateLane)
    pages, slots = (states("cpu", 9, ((6,), torch.bfloat16)), states("cpu", 4, ((9,), torch.float32)))
    return HostUnits(pages, slots, 12 * 12, torch.device("cpu")), pages, slots


def test_a_page_that_is_written_after_it_was_saved_is_saved_as_it_was(late: tuple) -> None:
    units, pages, slots = late
    page, slot = as_bytes(pages)[0][3], as_bytes(slots)[0][2]
    units.save_pages([3], [7])
    units.save_slot(2, [0, 1, 2])
    pages[0][3] = 0
    slots[0][2] = 0
    assert not units.get(7).tobytes().strip(b"\0"), "nobody has waited yet"
    units.settled()()
    assert units.get(7).tobytes() == page.numpy().tobytes()
    assert b"".join(units.get(n).tobytes() for n in (0, 1, 2))[:36] == slot.numpy().tobytes()


def test_loads_come_behind_saves_and_are_there_for_the_step_that_is_held(late: tuple) -> None:
    units, pages, slots = late
    before, slot = as_bytes(pages)[0], as_bytes(slots)[0][2]
    units.save_pages([3, 4], [7, 8])
    units.save_slot(2, [0, 1, 2])
    units.load_pages([8], [1])
    first = units.mark()
    units.load_slot([0, 1, 2], 3)
    units.load_pages([7], [2])
    second = units.mark()
    units.save_pages([5], [7])  # the unit is another's now
    assert (units.has_come(first), units.has_come(second)) == (False, False)
    units.hold(first)
    assert (as_bytes(pages)[0][1] == before[4]).all() and not units.has_come(second)
    units.hold(second)
    assert (as_bytes(pages)[0][2] == before[3]).all() and (as_bytes(slots)[0][3] == slot).all()
    units.close()


def test_memory_that_waits_to_be_copied_has_a_limit(late: tuple) -> None:
    """Steps wait for the oldest copies then."""
    units, pages, _ = late
    units._most_leaving = 40  # bytes; a page has 12
    before = as_bytes(pages)[0]
    for page_id in range(1, 9):
        units.save_pages([page_id], [page_id])
        assert units._leaving_bytes <= 40
    units.settled()()
    assert [units.get(n).tobytes() for n in range(1, 9)] == [before[n].numpy().tobytes() for n in range(1, 9)]
    units.mark()
    assert units._leaving_bytes == 0, "what has been copied waits for the next save"
