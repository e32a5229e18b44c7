"""A GPU without one: its tensors have sizes and no content, its driver and graphs are remembered."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
from torch.overrides import TorchFunctionMode

from hemiola.plugins import gpu
from hemiola.plugins.gpu.binaries import Binary
from hemiola.plugins.gpu.launch import Launch
from hemiola.runtime import llm
from hemiola.runtime.device import kernels, session

DEVICE = torch.device("cuda", 0)
META = torch.device("meta")


class FakeDriver(ModuleType):
    """A driver of CUDA `known` that loads what has not lost its end."""

    class DriverError(RuntimeError):
        pass

    def __init__(self, known: tuple[int, int] = (13, 0)) -> None:
        super().__init__("driver")
        self.known, self.loaded = known, []
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def version(self) -> tuple[int, int]:
        return self.known

    def load(self, binary: Binary, cubin: bytes, device: torch.device) -> Launch:
        if not cubin:
            raise self.DriverError(
                "cuLibraryLoadData: CUDA_ERROR_INVALID_IMAGE (device kernel image is invalid)"
            )
        self.loaded.append(binary.call)

        def launch(grid: tuple[int, ...], values: list[Any]) -> None:
            pass

        self.alive.add(launch)
        return launch


class _Meta(TorchFunctionMode):
    """What is made on a GPU has no content."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _meta(value) for name, value in (kwargs or {}).items()}
        return func(*map(_meta, args), **kwargs)


def _meta(value: Any) -> Any:
    return META if isinstance(value, torch.device) and value.type == "cuda" else value


class _Weights:
    """A file of weights whose content stays there."""

    def __init__(self, file: Path, framework: str, device: str) -> None:
        self._file = safetensors.safe_open(file, framework=framework)

    def __enter__(self) -> "_Weights":
        return self

    def __exit__(self, *_: object) -> None: ...

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name).to(META)


class Double:
    """What a GPU was told and holds."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.driver = FakeDriver()
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        told, graphs, driver = self.told, self.graphs, self.driver

        class Graph:
            def __init__(self) -> None:
                graphs.add(self)

            def capture_begin(self, **_: object) -> None: ...

            def capture_end(self) -> None: ...

            def __del__(self) -> None:
                if not driver.alive:
                    told.append("a graph outlives its kernels")

        self.cuda = fake_cuda(
            CUDAGraph=Graph,
            synchronize=lambda device: None,
            empty_cache=lambda: told.append("empty"),
            mem_get_info=lambda device: (2**33, 2**34),
            is_available=lambda: True,
            _lazy_init=lambda: None,
        )


def fake_cuda(**own: Any) -> SimpleNamespace:
    """torch.cuda of one stream and one pool of memory, with what a test looks at itself."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    return SimpleNamespace(
        OutOfMemoryError=torch.OutOfMemoryError,
        graph_pool_handle=lambda: "pool",
        Stream=lambda device: stream,
        current_stream=lambda device: stream,
        stream=lambda stream: nullcontext(),
        **own,
    )


class Copying:
    """A device that is done with copies when a test says so, or lost; and what of the host is page-locked."""

    def __init__(self) -> None:
        self.error = 0  # of CUDA
        self.num_begun = self.num_done = 0
        self.locked: set[int] = set()
        device = self

        class Event:
            def __init__(self) -> None:
                self.behind = 0

            def record(self) -> None:
                device.check()
                device.num_begun += 1
                self.behind = device.num_begun

            def query(self) -> bool:
                device.check()
                return self.behind <= device.num_done

        self.cuda = fake_cuda(Event=Event, cudart=lambda: self)

    def finish(self) -> None:
        self.num_done = self.num_begun

    def check(self) -> None:
        if self.error:
            raise RuntimeError(f"CUDA error: {self.error}")

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if not self.error:
            assert address % 4096 == 0 and not flags and address not in self.locked
            self.locked.add(address)
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if not self.error:
            self.locked.remove(address)
        return self.error

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"number {error}"


@contextmanager
def gpu_double() -> Iterator[Double]:
    """Inside, an engine for sm_90 opens in this thread as on an H200; none of its steps can be run."""
    double = Double()
    with pytest.MonkeyPatch.context() as patch, _Meta():
        patch.setattr(torch, "cuda", double.cuda)
        patch.setattr(torch._C, "_host_emptyCache", lambda: double.told.append("host"), raising=False)
        patch.setattr(llm, "find_device", lambda engine_dir, arch, num_ranks: DEVICE)
        patch.setattr(session, "safe_open", _Weights)
        patch.setattr(kernels, "arch_here", lambda: "sm_90")
        patch.setitem(__import__("sys").modules, "hemiola.plugins.gpu.driver", double.driver)
        patch.setattr(gpu, "driver", double.driver, raising=False)
        yield double
