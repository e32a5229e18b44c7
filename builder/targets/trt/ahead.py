"""What an op launches, told beforehand for steps of any size: for a compiler that calls no Python.

A launcher is run once, for the largest step, on tensors without memory whose sizes remember how they were
made. Where it chooses by size (tiles, or a launch that only long rows need), the largest step's choice is
taken for all: in a smaller step kernels find nothing to do, and no bit depends on a plan.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from math import prod
from threading import Lock
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from hemiola.builder.targets.trt.dims import Dim, number
from hemiola.plugins.gpu.device import Gpu, built_for
from hemiola.plugins.gpu.launch import Block, Kernel, Values, launches
from hemiola.plugins.sizes import Number

_PLANNING = Lock()  # what replaces launches, and for which GPU, is a module's
MADE = {torch.empty: None, torch.zeros: 0, torch.ones: 1, torch.Tensor.new_empty: None}


class NotAhead(ValueError):
    """What an op launches cannot be told beforehand; the message says why."""


class Memory(NamedTuple):
    """A tensor that kernels get: an argument of the op, or what its launcher makes."""

    shape: tuple[Number, ...]
    dtype: torch.dtype
    fill: int | None = None  # all zeros or ones; None: as it comes


class Launch(NamedTuple):
    """A kernel; its grid and its ints for a step of any size."""

    kernel: Kernel
    grid: tuple[Number, ...]
    values: tuple[Any, ...]  # by parameter: a tensor's name, a number or a FreeSize; None: an empty tensor
    constants: dict[str, Any]
    sample: Values  # as the kernel is called in the largest step


class LaunchPlan(NamedTuple):
    """All launches of an op, in order."""

    memory: dict[str, Memory]  # by name
    launches: tuple[Launch, ...]
    results: tuple[str, ...]


def ways(op: str, given: Mapping[str, "Sized"], attrs: Sequence[Any], gpu: Gpu) -> Iterable[dict[str, Any]]:
    """Options of the launcher to try, the best first: what `ahead` beside it offers."""
    module = import_module(f"hemiola.plugins.{op}.cuda")
    if not hasattr(module, "ahead"):
        return ({},)
    shapes = ([int(dim) for dim in sized.dims] for sized in given.values())
    return module.ahead(gpu, *(torch.empty(shape, device="meta") for shape in shapes), *attrs)


def plan(
    op: str, given: Mapping[str, "Sized"], attrs: Sequence[Any], gpu: Gpu, options: Mapping[str, Any]
) -> LaunchPlan:
    """Of a call whose tensors have these sizes. Raises NotAhead."""
    module = import_module(f"hemiola.plugins.{op}.cuda")
    watch = _Watch()
    tensors = [watch.note(name, sized.dims, sized.dtype) for name, sized in given.items()]
    with _PLANNING, built_for(gpu), launches(watch.look), _uncached(module), torch.inference_mode(), watch:
        made = getattr(module, op)(*tensors, *attrs, **options)
    results = made if isinstance(made, tuple) else (made,)
    return LaunchPlan(watch.memory, tuple(watch.launches), tuple(watch.name_of(result) for result in results))


class Sized(NamedTuple):
    """A contiguous tensor's sizes."""

    dims: tuple[int, ...]
    dtype: torch.dtype


@contextmanager
def _uncached(module: ModuleType) -> Iterator[None]:
    """Inside, the launcher makes anew what it else keeps from call to call."""
    kept = {name: value for name, value in vars(module).items() if hasattr(value, "cache_clear")}
    caches = {name: value for name, value in kept.items() if value.__module__ == module.__name__}
    try:
        for name, value in caches.items():
            setattr(module, name, value.__wrapped__)
        yield
    finally:
        for name, value in caches.items():
            setattr(module, name, value)


class _Watch(TorchFunctionMode):
    """Names every tensor by its memory, and lets sizes remember how they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[str, Memory] = {}
        self.launches: list[Launch] = []
        self._known: dict[int, tuple[str, tuple[int, ...]]] = {}  # by storage
        self._alive: list[torch.Tensor] = []

    def note(self, name: str, dims: tuple[int, ...], dtype: torch.dtype, fill: int | None = None) -> Any:
        tensor = torch.empty([int(dim) for dim in dims], dtype=dtype, device="meta")
        self.memory[name] = Memory(tuple(map(number, dims)), dtype, fill)
        self._known[tensor.untyped_storage()._cdata] = name, dims
        self._alive.append(tensor)
        return tensor

    def name_of(self, tensor: torch.Tensor) -> str:
        name, dims = self._of(tensor)
        if tensor.storage_offset() or tensor.numel() != prod(map(int, dims)):
            raise NotAhead(f"a kernel reads a part of {name}, and gets whole tensors only")
        return name

    def _of(self, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
        return self._known[tensor.untyped_storage()._cdata]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if func in MADE:
                sizes = args[1:] if func is torch.Tensor.new_empty else args
                sizes = tuple(sizes[0]) if isinstance(sizes[0], (tuple, list)) else sizes
                dtype = kwargs.get("dtype") or args[0].dtype
                return self.note(f"made_{len(self.memory)}", sizes, dtype, MADE[func])
            if isinstance(args[0], torch.Tensor) and func in _SIZES:
                return self._size(func, *args)
            return func(*args, **kwargs)

    def _size(self, func: Any, tensor: torch.Tensor, *where: int) -> Any:
        """A shape, a stride, or the like, of Dims where they vary."""
        dims = self._of(tensor)[1]
        varies = any(isinstance(dim, Dim) for dim in dims)
        if not varies or tuple(tensor.size()) != tuple(map(int, dims)):
            assert not varies, "a launcher asks for the size of a view of what varies"
            return func(tensor, *where)
        assert tensor.is_contiguous()
        match _SIZES[func]:
            case "shape":
                return dims
            case "numel":
                return prod(dims)
            case "len":
                assert not isinstance(dims[0], Dim), "len() forgets how a size was made: use shape[0]"
                return dims[0]
        strides = tuple(prod(dims[i + 1 :]) for i in range(len(dims)))
        return strides[where[0]] if where else strides

    def look(
        self, kernel: Kernel, grid: tuple[int, ...], values: Values, constants: Mapping[str, Any]
    ) -> None:
        with torch._C.DisableTorchFunction():
            told = tuple(self._told(kernel, value) for value in values)
            launch = Launch(kernel, tuple(map(number, grid)), told, dict(constants), values)
            self.launches.append(launch)

    def _told(self, kernel: Kernel, value: Any) -> Any:
        if isinstance(value, Block):
            raise NotAhead(f"{kernel.name} reads boxes of a tensor through a descriptor (TMA)")
        if isinstance(value, torch.Tensor):
            return self.name_of(value) if value.numel() else None
        return value if isinstance(value, float) else number(value)


_SIZES = {
    torch.Tensor.shape.__get__: "shape",  # pyright: ignore[reportAttributeAccessIssue]
    torch.Tensor.numel: "numel",
    torch.Tensor.__len__: "len",
    torch.Tensor.stride: "stride",
}
