"""Kernels of our ops as plugins of TensorRT: it keeps their PTX in its engine and launches them by itself.

States come in and out at one address.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from hemiola.builder.targets.trt.ahead import Memory
from hemiola.builder.targets.trt.dims import places_of
from hemiola.builder.targets.trt.ptx import PtxKernel
from hemiola.plugins.sizes import CEIL_DIV, OPERATIONS, evaluate
from hemiola.runtime.device.segments.tensorrt_ops import DOMAIN, DTYPES, signed

_registered: set[str] = set()


def register_kernels(entries: Sequence[PtxKernel], memory: Mapping[str, Memory]) -> None:
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
    entry: PtxKernel, memory: Mapping[str, Memory], trt: Any, trtp: Any
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
    describe.__signature__ = signed(_tensors(entry, trtp), results)  # pyright: ignore[reportFunctionMemberAccess]
    return describe


def _launch_kernel(entry: PtxKernel, memory: Mapping[str, Memory], trtp: Any) -> Callable[..., Any]:
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
    launch.__signature__ = signed([*_tensors(entry, trtp), *more], results)  # pyright: ignore[reportFunctionMemberAccess]
    return launch


def _numbers(
    entry: PtxKernel, memory: Mapping[str, Memory], tensors: Sequence[Any], trtp: Any
) -> Callable[[Any], Any]:
    """A function from numbers of the plan to expressions of TensorRT's."""
    sizes = {
        letter: tensor.shape_expr[place]
        for name, tensor in zip(entry.inputs, tensors, strict=True)
        for letter, place in places_of(memory[name].shape).items()
    }
    operations = {**OPERATIONS, CEIL_DIV: trtp.cdiv}
    return lambda value: evaluate(value, sizes, trtp.ShapeExpr, operations)


def _tensors(entry: PtxKernel, trtp: Any) -> list[tuple[str, Any]]:
    return [(f"in_{i}", trtp.TensorDesc) for i in range(len(entry.inputs))]
