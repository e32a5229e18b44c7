"""Between host and device: numbers go over without a wait, and time is measured where the work is done."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

ALIGNMENT = 16  # bytes
Shapes = Sequence[tuple[tuple[int, ...], Any]]  # and dtypes of numpy, of arrays


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """These arrays on the device, in one copy that the host does not wait for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    there = pack(arrays, pinned=True).to(device, non_blocking=True)
    return unpack(there, [(array.shape, array.dtype) for array in arrays])


def pack(arrays: Sequence[np.ndarray], pinned: bool) -> torch.Tensor:
    """Their bytes, one array behind the other."""
    where = spans([(array.shape, array.dtype) for array in arrays])
    packed = torch.empty(where[-1].stop, dtype=torch.uint8, pin_memory=pinned)
    numbers = packed.numpy()
    for span, array in zip(where, arrays, strict=True):
        numbers[span] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed


def unpack(packed: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    """Views of arrays that were packed."""
    kinds = [torch.from_numpy(np.empty(0, dtype)).dtype for _, dtype in shapes]
    return [
        packed[span].view(kind).view(shape)
        for span, kind, (shape, _) in zip(spans(shapes), kinds, shapes, strict=True)
    ]


def spans(shapes: Shapes) -> list[slice]:
    """Where the bytes of each array lie."""
    found, start = [], 0
    for shape, dtype in shapes:
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        found.append(slice(start, start + num_bytes))
        start += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return found


def upload_ints(device: torch.device, values: Sequence[int]) -> torch.Tensor:
    """int64, as places and counts are."""
    return upload(device, np.array(values, np.int64))[0]


def fetch(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """On the host; to be read when a `fence` behind this call has been passed."""
    return [tensor.to("cpu", non_blocking=True) for tensor in tensors]


def fence(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done what it was given so far."""
    if device.type == "cpu":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


class Watch:
    """Seconds of the device between marks; on a GPU to be read behind a `fence`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []  # times, or CUDA's events

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self, mark: int) -> float:
        """From this mark to the next."""
        start, end = self._marks[mark : mark + 2]
        return end - start if not self._on_gpu else start.elapsed_time(end) / 1000
