"""Where the ranks of an engine exchange on GPUs: memory of each one's device, into which all others write.

It is shared by CUDA's handles between processes. Nothing here multicasts.
"""

from contextlib import suppress
from functools import partial
from typing import Any

import torch

from hemiola.plugins.gpu.windows import window_bytes
from hemiola.plugins.ranks import make_group
from hemiola.runtime.device.ranks import SharedMemory
from hemiola.runtime.errors import Refused, one_line
from hemiola.runtime.extra import install

HEAD = 4096  # bytes of the shared memory that a device reads: the word at STOP is among them


class Windows:
    """A rank's own window, and those of the others as its device addresses them."""

    def __init__(self, memory: SharedMemory, rank: int, device: torch.device) -> None:
        """Raises Refused where a device cannot share memory."""
        try:
            from hemiola.plugins.gpu import driver  # cuda-python is not needed elsewhere
        except ImportError as error:
            message = f"ranks share the memory of GPUs through cuda-bindings, which is not here ({error})"
            raise Refused("not_found", message=message, way_out=f"run {install('cuda')}") from None
        self._driver, self._rank, self._device = driver, rank, device
        torch.empty(1, device=device)  # a context
        self._window, self._opened, self._memory = 0, list[int](), memory
        try:
            self._window = driver.allocate(window_bytes(memory.size))
            self.handle = driver.handle_of(self._window)
            self._stop = driver.map_host(memory.address, HEAD)
        except driver.DriverError as error:
            self.close()
            raise _refused(rank, error) from None

    def open(self, handles: list[bytes]) -> torch.Tensor:
        """The group that ops get. handles: of all ranks."""
        addresses = []
        for rank, handle in enumerate(handles):
            if rank == self._rank:
                addresses.append(self._window)
                continue
            try:
                addresses.append(self._driver.open_handle(handle))
            except self._driver.DriverError as error:
                raise _refused(rank, error) from None
            self._opened.append(addresses[-1])
        return make_group(self._rank, addresses, 0, self._stop).to(self._device)

    def close(self) -> None:
        """Nobody writes there any more. Safe to call twice."""
        opened, window, self._opened, self._window = self._opened, self._window, [], 0
        calls = [partial(self._driver.close_handle, address) for address in opened]
        if window:
            calls += [
                partial(self._driver.unmap_host, self._memory.address),
                partial(self._driver.free, window),
            ]
        with torch.cuda.device(self._device):
            for call in calls:
                with suppress(self._driver.DriverError):  # the device is lost, or it was not mapped
                    call()


def _refused(rank: int, error: Any) -> Refused:
    message = f"GPU {rank} shares no memory with the other ranks' ({one_line(error)})"
    return Refused("unsupported", "tp", message=message, way_out="use GPUs that reach each other, or --tp 1")
