"""CUDA graphs: what a step launches, recorded once per bucket and replayed by one call of the host.

They are captured when an engine opens: then a request never waits for one, what a step needs of memory is
known before the first comes, and a kernel that cannot be captured is an error at the start. All graphs share
one pool of memory, for no two of them run at once.
"""

import gc
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from hemiola.runtime.device.transfer import Shapes, send, spans, unpack
from hemiola.runtime.errors import Name, Refused, any_of

_CAPTURING = threading.Lock()
Bucket = TypeVar("Bucket", bound=Hashable)
Made = TypeVar("Made")
Captures = Callable[[int, int], None]  # hears how many graphs of how many are captured


class Stage:
    """A place on the device to which a step's arrays go in one copy, always the same one."""

    def __init__(self, shapes: Sequence[Shapes], device: torch.device) -> None:
        num_bytes = max(spans(arrays)[-1].stop for arrays in shapes)
        self._there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Begin to copy; the host goes on."""
        send(arrays, self._there)

    def views(self, shapes: Shapes) -> list[torch.Tensor]:
        """What was sent, as tensors."""
        return unpack(self._there, shapes)


class Graphs(Generic[Bucket, Made]):
    """A function of a bucket, replayed: it works on the same tensors every time."""

    def __init__(
        self,
        step: Callable[[Bucket], Made],
        buckets: Sequence[Bucket],
        warm: Sequence[Bucket],
        device: torch.device,
        pool: Any = None,
        report: Captures = lambda done, total: None,
    ) -> None:
        """Capture all buckets; before, run some that have all kernels: none can be compiled meanwhile.
        `pool`: of graphs that never run while what these gave is still wanted. `report`: how many of all have
        been captured."""
        self._graphs: dict[Bucket, tuple[torch.cuda.CUDAGraph, Made]] = {}
        self._device = device
        self.pool = pool or torch.cuda.graph_pool_handle()
        report(0, len(buckets))
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for bucket in warm:
                with _refusing(bucket, device):
                    step(bucket)
            gc.collect()  # it may close an engine, and wait for that
            with one_at_a_time():
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()  # graphs have memory of their own
                for bucket in buckets:
                    with _refusing(bucket, device):
                        self._graphs[bucket] = self._capture(step, bucket)
                    report(len(self._graphs), len(buckets))

    def _capture(self, step: Callable[[Bucket], Made], bucket: Bucket) -> tuple[torch.cuda.CUDAGraph, Made]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            made = step(bucket)
        finally:
            graph.capture_end()
        return graph, made

    def replay(self, bucket: Bucket, /) -> Made:
        """Run it with what its inputs hold now; its results are overwritten by the next replay."""
        graph, made = self._graphs[bucket]
        graph.replay()
        return made

    def close(self) -> None:
        """Give them back, before what they launch is unloaded."""
        wait_for(self._device)
        self._graphs.clear()


def wait_for(device: torch.device) -> None:
    """Until it has done all that it was told."""
    with one_at_a_time():
        torch.cuda.synchronize(device)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """For captures, and for what ends one of another engine: to wait for the device, to give its memory back.
    Nor does Python's collector run: it would free graphs of an engine that is gone, or close that."""
    with _CAPTURING:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


@contextmanager
def _refusing(bucket: object, device: torch.device) -> Iterator[None]:
    """Says what to do where a step finds no memory, or cannot be captured."""
    free, total = torch.cuda.mem_get_info(device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = (
            f"there is no memory for a step of {bucket}: weights, pages and slots leave {free} of {total}"
            " bytes"
        )
        lower = any_of("max_rows", "max_step_tokens", "memory_fraction", "cache_bytes")
        raise Refused("exhausted", "max_rows", message=message, way_out=("lower ", *lower)) from error
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        message = f"the step of {bucket} cannot be captured as a CUDA graph ({reason})"
        way_out = ("report it, and start with ", Name("cuda_graphs", False), " meanwhile")
        raise Refused("failed", "cuda_graphs", message=message, way_out=way_out) from error
