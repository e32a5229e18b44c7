"""Our ops as quickly deployable plugins of TensorRT 10.9 and newer.

Ahead of time: a plugin for each kernel that an op launches (plugins/gpu/ptx.py). TensorRT keeps its PTX in
the engine and launches it by itself. What an op cannot be told beforehand is a callback into Python: one
plugin made of its declaration, which runs the form that a torch engine runs, on TensorRT's stream and memory,
in a process that has called `register`. Either way states come in and out at one address.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from hemiola.plugins import OPS
from hemiola.plugins.spec import Op

if TYPE_CHECKING:  # Triton compiles them; who runs an engine needs none
    from hemiola.plugins.gpu.ahead import Memory
    from hemiola.plugins.gpu.ptx import PtxKernel

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
        if not (op.has_onnx_body or op.is_fusion):
            plugin_id = f"{DOMAIN}::{op.name}"
            trtp.register(plugin_id)(_describe(op, trt, trtp))
            trtp.impl(plugin_id)(_run(op, trtp))


_registered: set[str] = set()


def register_kernels(entries: "Sequence[PtxKernel]", memory: "Mapping[str, Memory]") -> None:
    """Tell TensorRT's registry of an op's kernels; `memory` is that of the op's plan."""
    trt: Any = import_module("tensorrt")
    trtp: Any = import_module("tensorrt.plugin")
    for entry in entries:
        if entry.name not in _registered:
            plugin_id = f"{DOMAIN}::{entry.name}"
            trtp.register(plugin_id)(_describe_kernel(entry, memory, trt, trtp))
            trtp.aot_impl(plugin_id)(_launch_kernel(entry, memory, trtp))
            _registered.add(entry.name)


def _describe_kernel(
    entry: "PtxKernel", memory: "Mapping[str, Memory]", trt: Any, trtp: Any
) -> Callable[..., Any]:
    """Shapes and dtypes of what it makes, then the tensors that come out where they come in."""
    names = {dtype: getattr(trt.DataType, name) for name, dtype in DTYPES.items()}

    def describe(*tensors: Any) -> tuple[Any, ...]:
        number = _numbers(entry, memory, tensors, trtp)
        made = []
        for name in entry.made():
            shape = trtp.ShapeExprs.from_tuple([number(size) for size in memory[name].shape])
            made.append(trtp.from_shape_expr(shape, names[memory[name].dtype]))
        kept = entry.outputs[len(made) :]
        return (*made, *(tensors[entry.inputs.index(name)].aliased() for name in kept))

    results = tuple.__class_getitem__((trtp.TensorDesc,) * len(entry.outputs))
    describe.__signature__ = _signed(_tensors(entry, trtp), results)  # pyright: ignore[reportFunctionMemberAccess]
    return describe


def _launch_kernel(entry: "PtxKernel", memory: "Mapping[str, Memory]", trtp: Any) -> Callable[..., Any]:
    """The kernel, its grid, and its ints between the pointers of inputs and outputs."""

    def launch(*values: Any) -> tuple[Any, ...]:
        *tensors, _, _ = values  # outputs, tactic
        number = _numbers(entry, memory, tensors, trtp)
        params = trtp.KernelLaunchParams(
            *map(number, entry.grid), block_x=entry.threads, shared_mem=entry.shared
        )
        ints = trtp.SymIntExprs.from_tuple([number(value) for value in entry.ints])
        return entry.name, entry.ptx, params, ints

    results = tuple.__class_getitem__((str, str, trtp.KernelLaunchParams, trtp.SymIntExprs))
    more = [("outputs", tuple.__class_getitem__((trtp.TensorDesc,))), ("tactic", int)]
    launch.__signature__ = _signed([*_tensors(entry, trtp), *more], results)  # pyright: ignore[reportFunctionMemberAccess]
    return launch


def _numbers(
    entry: "PtxKernel", memory: "Mapping[str, Memory]", tensors: Sequence[Any], trtp: Any
) -> Callable[[Any], Any]:
    """A function from numbers of the plan to expressions of TensorRT's."""
    from hemiola.plugins.gpu.terms import evaluate, places_of

    sizes = {
        letter: tensor.shape_expr[place]
        for name, tensor in zip(entry.inputs, tensors, strict=True)
        for letter, place in places_of(memory[name].shape).items()
    }
    return lambda value: evaluate(value, sizes, trtp.ShapeExpr, trtp.cdiv)


def _tensors(entry: "PtxKernel", trtp: Any) -> list[tuple[str, Any]]:
    return [(f"in_{i}", trtp.TensorDesc) for i in range(len(entry.inputs))]


def _signed(named: Sequence[tuple[str, Any]], results: Any) -> inspect.Signature:
    """What TensorRT reads of a function."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=note) for name, note in named]
    return inspect.Signature(parameters, return_annotation=results)


def _signature(op: Op, tensor: Any, results: Any, *more: tuple[str, Any]) -> inspect.Signature:
    """Tensors, attributes, then `more`."""
    named = [(arg.name, tensor) for arg in op.args] + [(attr.name, attr.type) for attr in op.attrs]
    return _signed([*named, *more], results)


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
