"""Between host and device: numbers go over without a wait."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from hemiola.runtime.device.pinned import PINNED

ALIGNMENT = 16  # bytes
WITH_COMMAND = 2**16  # bytes that CUDA sends with the command: they wait for no copy that is under way
Shapes = Sequence[tuple[tuple[int, ...], Any]]  # and dtypes of numpy, of arrays


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """These arrays on the device, in one copy that the host does not wait for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    shapes = [(array.shape, array.dtype) for array in arrays]
    there = torch.empty(spans(shapes)[-1].stop, dtype=torch.uint8, device=device)
    send(arrays, there)
    return unpack(there, shapes)


def send(arrays: Sequence[np.ndarray], there: torch.Tensor) -> None:
    """Begin to copy their bytes to the start of `there`, one array behind the other; the host goes on."""
    where = spans([(array.shape, array.dtype) for array in arrays])
    with _lent(where[-1].stop, there) as packed:
        numbers = packed.numpy()
        for span, array in zip(where, arrays, strict=True):
            numbers[span] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        there[: len(packed)].copy_(packed, non_blocking=True)


def _lent(num_bytes: int, there: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
    """Bytes of the host to be copied to a tensor."""
    if there.is_cuda and num_bytes > WITH_COMMAND:
        return PINNED.lend(num_bytes)
    return nullcontext(torch.empty(num_bytes, dtype=torch.uint8))


def unpack(packed: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    """Views of arrays that were packed."""
    kinds = [torch.from_numpy(np.empty(0, dtype)).dtype for _, dtype in shapes]
    return [
        packed[span].view(kind).view(shape)
        for span, kind, (shape, _) in zip(spans(shapes), kinds, shapes, strict=True)
    ]


def spans(shapes: Shapes) -> list[slice]:
    """Where the bytes of each array lie."""
    return _spans(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes)


def _spans(sizes: Iterable[int]) -> list[slice]:
    slices, start = [], 0
    for num_bytes in sizes:
        slices.append(slice(start, start + num_bytes))
        start += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return slices


def upload_ints(device: torch.device, values: Sequence[int]) -> torch.Tensor:
    """int64, as places and counts are."""
    return upload(device, np.array(values, np.int64))[0]


def fetch(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """On the host; to be read when a `fence` behind this call has been passed."""
    if not tensors[0].is_cuda:
        return [tensor.to("cpu") for tensor in tensors]
    where = _spans(tensor.nbytes for tensor in tensors)
    with PINNED.lend(where[-1].stop) as packed:
        copies = [packed[span].view(t.dtype).view(t.shape) for span, t in zip(where, tensors, strict=True)]
        for here, tensor in zip(copies, tensors, strict=True):
            here.copy_(tensor, non_blocking=True)
    return copies


def fence(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done what it was given so far."""
    if device.type == "cpu":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize
