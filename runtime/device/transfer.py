"""Between host and device: numbers go over without a wait, and time is measured where the work is done."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

ALIGNMENT = 16  # bytes


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """These arrays on the device, in one copy that the host does not wait for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0] + [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    spans = [slice(start, start + array.nbytes) for start, array in zip(starts, arrays, strict=False)]
    for span, array in zip(spans, arrays, strict=True):
        packed.numpy()[span] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = packed.to(device, non_blocking=True)
    return [
        there[span].view(torch.from_numpy(array).dtype).view(array.shape)
        for span, array in zip(spans, arrays, strict=True)
    ]


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
