"""Our ops as quickly deployable plugins of TensorRT 10.9 and newer, called back in Python.

Most ops are kernels inside a TensorRT engine (builder/targets/trt/registry.py). An op whose launches cannot
be planned ahead is a callback: one plugin made of its declaration, which runs the form that a torch engine
runs, on TensorRT's stream and memory, in a process that has called `register`.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch

from hemiola.plugins import OPS
from hemiola.plugins.spec import Op

DOMAIN = "hemiola"
DTYPES = {
    "FLOAT": torch.float32,
    "BF16": torch.bfloat16,
    "HALF": torch.float16,
    "INT32": torch.int32,
}


@cache
def register() -> None:
    """Tell TensorRT's registry of every op that a graph has and ONNX has no body for; once for a process."""
    trt: Any = import_module("tensorrt")
    trtp: Any = import_module("tensorrt.plugin")
    for op in OPS.values():
        if op.runs_on("cuda") and not (op.has_onnx_body or op.exchanges):
            plugin_id = f"{DOMAIN}::{op.name}"
            trtp.register(plugin_id)(_describe(op, trt, trtp))
            trtp.impl(plugin_id)(_run(op, trtp))


def signed(named: Sequence[tuple[str, Any]], results: Any) -> inspect.Signature:
    """What TensorRT reads of a function."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=note) for name, note in named]
    return inspect.Signature(parameters, return_annotation=results)


def _signature(op: Op, tensor: Any, results: Any, *more: tuple[str, Any]) -> inspect.Signature:
    """Tensors, attributes, then `more`."""
    named = [(arg.name, tensor) for arg in op.args] + [(attr.name, attr.type) for attr in op.attrs]
    return signed([*named, *more], results)


def _describe(op: Op, trt: Any, trtp: Any) -> Callable[..., Any]:
    """Shapes and dtypes of results, then the states, each at the address that it comes in."""
    names = {dtype: getattr(trt.DataType, name) for name, dtype in DTYPES.items()}

    def describe(*tensors: Any, **attrs: Any) -> tuple[Any, ...]:
        sizes = {digit: int(digit) for digit in "128"}
        sizes |= {attr.letter: attrs[attr.name] for attr in op.attrs if attr.letter}
        for arg, tensor in zip(op.args, tensors, strict=True):
            if not arg.shape.endswith("*"):
                sizes |= {letter: tensor.shape_expr[i] for i, letter in enumerate(arg.shape)}
        made = []
        for result in op.results:
            shape = trtp.ShapeExprs.from_tuple([sizes[letter] for letter in result.shape])
            dtype = tensors[0].dtype if result.dtype is None else names[result.dtype]
            made.append(trtp.from_shape_expr(shape, dtype))
        states = (tensor.aliased() for arg, tensor in zip(op.args, tensors, strict=True) if arg.mutated)
        return (*made, *states)

    num_outputs = len(op.results) + sum(arg.mutated for arg in op.args)
    results = tuple.__class_getitem__((trtp.TensorDesc,) * num_outputs)
    describe.__signature__ = _signature(op, trtp.TensorDesc, results)  # pyright: ignore[reportFunctionMemberAccess]
    return describe


def _run(op: Op, trtp: Any) -> Callable[..., None]:
    """The form for this call, whose results are copied to where TensorRT wants them."""

    def run(*values: Any, stream: int) -> None:
        *given, outputs = values
        tensors = [_tensor(value) for value in given[: len(op.args)]]
        attrs = given[len(op.args) :]
        call = op.call(*tensors, *attrs)
        form = op.choose(call, tensors[0].device.type).form
        function = op.bind(form.name, [call.sizes[letter] for letter in form.sizes])
        with _on(stream, tensors[0].device):
            made = function(*tensors, *attrs)
            made = [made] if isinstance(made, torch.Tensor) else made
            for output, result in zip(outputs, made, strict=False):  # behind them stand the states
                _tensor(output).copy_(result)

    more = [("outputs", tuple.__class_getitem__((trtp.Tensor,))), ("stream", int)]
    run.__signature__ = _signature(op, trtp.Tensor, None, *more)  # pyright: ignore[reportFunctionMemberAccess]
    return run


class _Memory:
    """Bytes at an address of the GPU, as torch takes them."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _tensor(value: Any) -> torch.Tensor:
    """TensorRT's tensor as torch's, of the same memory."""
    dtype, shape = DTYPES[value.dtype.name], tuple(value.shape)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype, device="cuda")
    return torch.as_tensor(_Memory(value.data_ptr, num_bytes), device="cuda").view(dtype).view(shape)


def _on(stream: int, device: torch.device) -> Any:
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))
