"""Windows for ranks on GPUs, with a double of the driver."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hemiola import Refused
from hemiola.plugins import gpu
from hemiola.runtime.device.ranks import SharedMemory
from hemiola.runtime.device.windows import Windows


class DriverError(RuntimeError):
    """As in plugins/gpu/driver.py."""


MEMORY = cast(SharedMemory, SimpleNamespace(size=2, address=64))


def refuse(*given: Any) -> None:
    raise DriverError("it cannot")


def test_a_window_that_is_not_mapped_goes_back_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was never mapped cannot be unmapped, and the driver says so."""
    freed: list[int] = []
    double = SimpleNamespace(
        DriverError=DriverError,
        allocate=lambda num_bytes: 4096,
        handle_of=refuse,
        unmap_host=refuse,
        free=freed.append,
    )
    monkeypatch.setattr(gpu, "driver", double, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with pytest.raises(Refused, match=r"GPU 0 shares no memory with the other ranks' \(it cannot\)"):
        Windows(MEMORY, 0, torch.device("cpu"))
    assert freed == [4096]


def test_ranks_without_cuda_bindings_are_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hemiola.plugins.gpu.driver", None)
    monkeypatch.delattr(gpu, "driver", raising=False)
    with pytest.raises(Refused, match="through cuda-bindings, which is not here"):
        Windows(MEMORY, 0, torch.device("cpu"))
