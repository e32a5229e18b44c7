"""Interpreted kernels touch nothing but the memory of their arguments.

Triton's interpreter takes addresses as they come: one that is outside of all tensors ends the process, or
finds somebody else's numbers, as on a GPU. Inside `memory_checked`, it raises.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, interpreter_builder
from triton.tools.tensor_descriptor import TensorDescriptor

SHARED: list[torch.Tensor] = []  # bytes that any kernel may touch: ranks find each other by addresses
Span = tuple[int, int]  # the first address, and the first behind it


@contextmanager
def memory_checked() -> Iterator[None]:
    """Inside, every load, store and atomic of an interpreted kernel must lie in one of its arguments, up to
    the last number of a view, and of one whose numbers are as wide, or are bytes."""
    builder, give = interpreter_builder, GridExecutor._init_args_hst
    load, store = builder.create_masked_load, builder.create_masked_store
    cas, rmw = builder.create_atomic_cas, builder.create_atomic_rmw
    kernel = _Kernel("none", {})

    def given(self: Any, *values: Any) -> Any:
        nonlocal kernel
        args, named = give(self, *values)
        kernel = _Kernel(self.fn.__name__, dict(zip(self.arg_names, args, strict=False)) | named)
        return args, named

    def checked_load(ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        kernel.check("loads", ptrs, mask.data)
        return load(ptrs, mask, *rest, **named)

    def checked_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        kernel.check("stores", ptrs, mask.data)
        return store(ptrs, value, mask, *rest)

    def checked_cas(ptrs: Any, *rest: Any) -> Any:
        kernel.check("changes", ptrs, np.ones(1))
        return cas(ptrs, *rest)

    def checked_rmw(op: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        kernel.check("changes", ptrs, mask.data)
        return rmw(op, ptrs, value, mask, *rest)

    instead = dict(create_masked_load=checked_load, create_masked_store=checked_store,
                   create_atomic_cas=checked_cas, create_atomic_rmw=checked_rmw)  # fmt: skip
    with patch.multiple(builder, **instead), patch.object(GridExecutor, "_init_args_hst", given):
        yield


class _Kernel:
    """A launch, and which memory it was given."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self.name = name
        self.tensors = {name: tensor for name, value in arguments.items() for tensor in _tensors(value)}
        self.tensors |= {f"shared {number}": tensor for number, tensor in enumerate(SHARED)}
        self.bounds: dict[int, np.ndarray] = {}  # by a number's bytes: ends of spans, in order

    def check(self, does: str, ptrs: Any, mask: Any) -> None:
        size = max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)
        places, there = np.broadcast_arrays(ptrs.data, np.asarray(mask, bool))  # some masks are ints
        asked = places[there].astype(np.uint64)
        if size not in self.bounds:
            spans = [_span(tensor, size) for tensor in self.tensors.values() if _may_have(tensor, size)]
            self.bounds[size] = np.array(_merged(spans), np.uint64).reshape(-1)
        inside = np.searchsorted(self.bounds[size], asked, "right") % 2 == 1  # behind a first, before an end
        if not inside.all():
            raise AssertionError(f"{self.name} {does} {self._where(int(asked[~inside][0]), size)}")

    def _where(self, address: int, size: int) -> str:
        def distance(span: Span) -> int:
            return max(span[0] - address, address - span[1] + 1, 0)

        spans = {n: _span(t, size) for n, t in self.tensors.items() if _may_have(t, size) and t.numel()}
        if not spans:
            return f"{size} bytes where it has no such tensor"
        nearest = min(spans, key=lambda name: distance(spans[name]))
        at, tensor = (address - spans[nearest][0]) / size, self.tensors[nearest]
        return f"number {at:g} of {nearest}, {list(tensor.shape)} in steps of {list(tensor.stride())}"


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    value = value.base if isinstance(value, TensorDescriptor) else value
    return (value,) if isinstance(value, torch.Tensor) else ()


def _may_have(tensor: torch.Tensor, size: int) -> bool:
    """Numbers of so many bytes; pages of codes have numbers of any size."""
    return tensor.element_size() == size or tensor.dtype is torch.uint8


def _span(tensor: torch.Tensor, size: int) -> Span:
    """Where a number of so many bytes may begin: from its first number up to its last."""
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (last + 2) * tensor.element_size() - size


def _merged(spans: Iterable[Span]) -> list[Span]:
    """In order, without what overlaps or touches."""
    merged: list[Span] = []
    for first, end in sorted(spans):
        if first == end:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((first, end))
    return merged
