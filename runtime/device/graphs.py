"""CUDA graphs: what a step launches, recorded once per bucket and replayed by one call of the host.

They are captured when an engine opens: then a request never waits for one, what a step needs of memory is
known before the first comes, and a kernel that cannot be captured is an error at the start. All graphs share
one pool of memory, for no two of them run at once.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from hemiola.runtime.device.transfer import ALIGNMENT
from hemiola.runtime.errors import Refused

Bucket = TypeVar("Bucket", bound=Hashable)
Made = TypeVar("Made")
Shapes = Sequence[tuple[tuple[int, ...], Any]]


class Stage:
    """A place on the device to which a step's arrays go in one copy, always the same one."""

    def __init__(self, shapes: Sequence[Shapes], device: torch.device) -> None:
        num_bytes = max(_spans(arrays)[-1].stop for arrays in shapes)
        self._there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Begin to copy; the host goes on."""
        spans = _spans([(array.shape, array.dtype) for array in arrays])
        packed = torch.empty(spans[-1].stop, dtype=torch.uint8, pin_memory=self._there.is_cuda)
        there = packed.numpy()
        for span, array in zip(spans, arrays, strict=True):
            there[span] = array.reshape(-1).view(np.uint8)
        self._there[: len(packed)].copy_(packed, non_blocking=True)

    def views(self, shapes: Shapes) -> list[torch.Tensor]:
        """What was sent, as tensors."""
        views = []
        for span, (shape, dtype) in zip(_spans(shapes), shapes, strict=True):
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            views.append(self._there[span].view(kind).view(shape))
        return views


def _spans(shapes: Shapes) -> list[slice]:
    """Where each array's bytes lie."""
    spans, start = [], 0
    for shape, dtype in shapes:
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        spans.append(slice(start, start + num_bytes))
        start += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return spans


def mark(times: torch.Tensor, at: int) -> None:
    """Let the device write its time in nanoseconds, when it comes to this."""
    if times.is_cuda:
        from hemiola.plugins.gpu.clock.cuda import write_time

        write_time(times, at)
    else:
        times[at] = time.perf_counter_ns()


class Graphs(Generic[Bucket, Made]):
    """A function of a bucket, replayed: it works on the same tensors every time."""

    def __init__(
        self, step: Callable[[Bucket], Made], buckets: Sequence[Bucket], device: torch.device
    ) -> None:
        """Capture all buckets. A kernel is run once before, for compiling cannot be captured."""
        self._graphs: dict[Bucket, tuple[torch.cuda.CUDAGraph, Made]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        free, _ = torch.cuda.mem_get_info(device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        for bucket in buckets:
            try:
                with torch.cuda.stream(stream):
                    step(bucket)
                    self._graphs[bucket] = self._capture(step, bucket)
            except torch.OutOfMemoryError as error:
                raise Refused(
                    f"there is no memory for a step of {bucket}: {free} bytes were free beside weights, pages"
                    f" and slots; lower max_rows, max_step_tokens, memory_fraction or cache_bytes"
                ) from error
            except RuntimeError as error:
                raise Refused(
                    f"the step of {bucket} cannot be captured as a CUDA graph ({_first_line(error)});"
                    f" report it, and start with cuda_graphs=False (--cuda-graphs false) meanwhile"
                ) from error
        torch.cuda.synchronize(device)

    def _capture(self, step: Callable[[Bucket], Made], bucket: Bucket) -> tuple[torch.cuda.CUDAGraph, Made]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            made = step(bucket)
        finally:
            graph.capture_end()
        return graph, made

    def replay(self, bucket: Bucket) -> Made:
        """Run it with what its inputs hold now; its results are overwritten by the next replay."""
        graph, made = self._graphs[bucket]
        graph.replay()
        return made


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
