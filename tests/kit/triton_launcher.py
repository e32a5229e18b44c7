"""Kernels by Triton's own launcher: under TRITON_INTERPRET=1 without a GPU, or to compare with it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from hemiola.plugins.gpu.compile import DTYPES, layout_of, source
from hemiola.plugins.gpu.launch import WORDS, Block, Kernel, Values, launches


@contextmanager
def launched_by_triton() -> Iterator[None]:
    """Inside, Triton launches all kernels itself."""
    with launches(_launch):
        yield


def _launch(kernel: Kernel, grid: tuple[int, ...], values: Values, constants: Mapping[str, Any]) -> None:
    function = source(kernel.name)
    given = (_value(value, isinstance(function, GluonJITFunction)) for value in values)
    function[grid](*given, **{name: _constant(value) for name, value in constants.items()})


def _value(value: Any, is_gluon: bool) -> Any:
    if not isinstance(value, Block):
        return value
    box = list(value.box)
    if is_gluon:
        return GluonDescriptor.from_tensor(value.tensor, box, layout_of(box, WORDS[value.tensor.dtype]))
    return TensorDescriptor.from_tensor(value.tensor, box)


def _constant(value: Any) -> Any:
    return DTYPES[WORDS[value]] if isinstance(value, torch.dtype) else value
