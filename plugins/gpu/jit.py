"""Kernels by Triton's own launcher: under TRITON_INTERPRET=1 without a GPU, or to compare with it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from hemiola.plugins.gpu.compile import DTYPES, source
from hemiola.plugins.gpu.launch import WORDS, Block, Kernel, Values, launches


@contextmanager
def launched_by_triton() -> Iterator[None]:
    """Inside, Triton launches all kernels itself."""
    with launches(_launch):
        yield


def _launch(kernel: Kernel, grid: tuple[int, ...], values: Values, constants: Mapping[str, Any]) -> None:
    source(kernel.name)[grid](
        *map(_value, values), **{name: _constant(value) for name, value in constants.items()}
    )


def _value(value: Any) -> Any:
    return TensorDescriptor.from_tensor(value.tensor, list(value.box)) if isinstance(value, Block) else value


def _constant(value: Any) -> Any:
    return DTYPES[WORDS[value]] if isinstance(value, torch.dtype) else value
