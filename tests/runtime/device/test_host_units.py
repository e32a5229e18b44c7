"""Pages and slots come back from the host as they were, and nothing else is touched."""

import pytest
import torch

from hemiola.runtime.device import host_units
from hemiola.runtime.device.host_units import HostUnits

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
def test_what_was_saved_is_loaded(monkeypatch: pytest.MonkeyPatch, device: str, at_once: int) -> None:
    monkeypatch.setattr(host_units, "AT_ONCE", at_once)
    pages = states(device, 9, ((3, 5), torch.bfloat16), ((7,), torch.uint8), ((2, 2), torch.float32))
    slots = states(device, 4, ((11, 3), torch.float32), ((5,), torch.bfloat16))
    before_pages, before_slots = as_bytes(pages), as_bytes(slots)
    page_bytes = 30 + 7 + 16
    units = HostUnits(pages, slots, 12 * page_bytes + 5, torch.device(device))
    assert (units.num_units, units.units_per_slot) == (12, -(-(132 + 10) // page_bytes))
    units.save_pages([2, 8, 5], [4, 3, 11])
    units.save_slot(3, [0, 7, 8])
    for tensor in (*pages, *slots):
        tensor.view(torch.uint8).fill_(0)
    units.load_pages([11, 4, 3], [1, 2, 3])
    units.load_slot([0, 7, 8], 1)
    for before, now in zip(before_pages, as_bytes(pages), strict=True):
        assert [bool((now[n] == before[m]).all()) for n, m in ((1, 5), (2, 2), (3, 8))] == [True] * 3
        assert not now[4:].any() and not now[0].any()
    for before, now in zip(before_slots, as_bytes(slots), strict=True):
        assert (now[1] == before[3]).all() and not now[2:].any() and not now[0].any()
    units.close()
