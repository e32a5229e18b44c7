"""Kernels by Triton's own launcher: compiled at their first call, or interpreted under TRITON_INTERPRET=1."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from hemiola.plugins.gpu.launch import Block, Kernel

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def launch(
    kernel: Kernel, grid: tuple[int, ...], arguments: Sequence[Any], constants: Mapping[str, Any]
) -> None:
    source(kernel)[grid](*map(_argument, arguments), **{name: constant(v) for name, v in constants.items()})


def source(kernel: Kernel) -> Any:
    """Triton's function."""
    return getattr(import_module(f"hemiola.plugins.{kernel.op}.triton"), kernel.name)


def _argument(value: Any) -> Any:
    return TensorDescriptor.from_tensor(value.tensor, list(value.box)) if isinstance(value, Block) else value


def constant(value: Any) -> Any:
    return DTYPES[value] if isinstance(value, torch.dtype) else value
