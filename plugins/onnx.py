"""The ops in ONNX: a node of our own domain, or a body of ONNX's own operators.

An op whose folder has `onnx.py` is compiled together with the dense layers around it. That file's `body`
computes as the reference does: in fp32, rounded once at the end. The other ops stay nodes of ours: they hold
states, look at other tokens, or choose. Such a node is the declaration: every argument, absent ones too, is
an input, and behind the results stands an output for each argument that is updated in place.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import onnx
import torch
from onnx import TensorProto
from onnx.defs import OpSchema

from hemiola.plugins import OPS
from hemiola.plugins.spec import Op

OPSET = 23  # the first with RMSNormalization
DOMAIN = "hemiola"
VERSION = 1
DTYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float16: TensorProto.FLOAT16,
    torch.float64: TensorProto.DOUBLE,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
    torch.uint8: TensorProto.UINT8,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
}
KINDS = {
    int: OpSchema.AttrType.INT,
    bool: OpSchema.AttrType.INT,
    float: OpSchema.AttrType.FLOAT,
    str: OpSchema.AttrType.STRING,
}
PLUGIN = {"plugin_version": "1", "plugin_namespace": DOMAIN}  # how TensorRT's parser finds a plugin


class Emit(Protocol):
    """Adds nodes to a graph."""

    def __call__(self, op: str, inputs: Sequence[str], outputs: int = 1, **attrs: Any) -> Any: ...

    def constant(self, value: np.ndarray) -> str: ...

    def cast(self, value: str, source: torch.dtype, target: torch.dtype) -> str: ...


@cache
def register() -> None:
    """Tell onnx's checker what our nodes are."""
    for op in OPS.values():
        if is_plugin(op):
            onnx.defs.register_schema(schema(op))


def schema(op: Op) -> OpSchema:
    """What an op's declaration says, in ONNX's words."""
    types = {arg.name: f"T_{arg.name}" for arg in op.args}
    constraints = [
        (types[arg.name], [_type(dtype) for dtype in arg.dtypes], f"dtypes of {arg.name}") for arg in op.args
    ]
    results = [types[op.args[0].name] if r.dtype is None else _type(r.dtype) for r in op.results]
    outputs = [OpSchema.FormalParameter(f"result_{i}", kind) for i, kind in enumerate(results)]
    outputs += [OpSchema.FormalParameter(f"{a.name}_next", types[a.name]) for a in op.args if a.mutated]
    attributes = [OpSchema.Attribute(attr.name, KINDS[attr.type], required=True) for attr in op.attrs]
    for name, value in PLUGIN.items():
        default = onnx.helper.make_attribute(name, value)
        attributes.append(OpSchema.Attribute(name, default, "how TensorRT's parser finds the plugin"))
    return OpSchema(
        op.name,
        DOMAIN,
        VERSION,
        doc=op.schema(),
        inputs=[OpSchema.FormalParameter(arg.name, types[arg.name]) for arg in op.args],
        outputs=outputs,
        type_constraints=constraints,
        attributes=attributes,
    )


def _type(dtype: torch.dtype) -> str:
    name = TensorProto.DataType.Name(DTYPES[dtype]).lower()  # pyright: ignore[reportArgumentType]
    return f"tensor({name})"


def is_plugin(op: Op) -> bool:
    return not op.has_onnx_body


def body(op: Op) -> Callable[..., str]:
    """What `plugins/<op>/onnx.py` emits in place of a node of ours."""
    return import_module(f"hemiola.plugins.{op.name}.onnx").body


def silu(emit: Emit, x: str) -> str:
    return emit("Mul", [x, emit("Sigmoid", [x])])
