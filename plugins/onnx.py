"""The ops in ONNX: a node of our own domain, or a body of ONNX's own operators.

An op with a body (`BODIES`) is compiled together with the dense layers around it. The others stay ours: they
hold states, look at other tokens, or choose. Their node is the declaration: every argument, absent ones too,
is an input; behind the results stands an output for each argument that is updated in place.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import numpy as np
import onnx
import torch
from onnx import TensorProto
from onnx.defs import OpSchema

from hemiola.plugins import DENSE, OPS
from hemiola.plugins.spec import Call, Op

OPSET = 23  # the first with RMSNormalization
DOMAIN = "hemiola"
VERSION = 1
DTYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float16: TensorProto.FLOAT16,
    torch.float64: TensorProto.DOUBLE,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
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


def is_plugin(op: Op) -> bool:
    return op.name not in DENSE


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


# Bodies. They compute as the references do: in fp32, rounded once at the end.


def _linear(emit: Emit, call: Call, x: str, weight: str, bias: str) -> str:
    return emit("Gemm", [x, weight, *([bias] if "bias" in call.dtypes else [])], transB=1)


def _norm(emit: Emit, call: Call, x: str, gate: str, weight: str) -> str:
    attrs, dtype, width = call.attrs, call.dtypes["x"], call.sizes["W"]
    y, opening, group_len = emit.cast(x, dtype, torch.float32), "", attrs["group_len"]
    if "gate" in call.dtypes:
        opening = _silu(emit, emit.cast(gate, call.dtypes["gate"], torch.float32))
        if attrs["gate_first"]:
            y = emit("Mul", [y, opening])
    weight = emit.cast(weight, call.dtypes["weight"], torch.float32)
    rms = {"epsilon": attrs["eps"], "axis": -1}
    if group_len == width:
        y = emit("RMSNormalization", [y, weight], **rms)
    else:
        y = emit("Reshape", [y, emit.constant(np.array([-1, width // group_len, group_len]))])
        y = emit("RMSNormalization", [y, emit.constant(np.ones(group_len, np.float32))], **rms)
        y = emit("Reshape", [y, emit.constant(np.array([-1, width]))])
        y = emit("Mul", [y, weight])
    if opening and not attrs["gate_first"]:
        y = emit("Mul", [y, opening])
    return emit.cast(y, torch.float32, dtype)


def _gate(emit: Emit, call: Call, x: str, gate: str) -> str:
    dtype = call.dtypes["x"]
    wide, opening = (emit.cast(v, call.dtypes[n], torch.float32) for n, v in (("x", x), ("gate", gate)))
    opening = _silu(emit, opening) if call.attrs["kind"] == "silu" else emit("Sigmoid", [opening])
    return emit.cast(emit("Mul", [wide, opening]), torch.float32, dtype)


def _silu(emit: Emit, x: str) -> str:
    return emit("Mul", [x, emit("Sigmoid", [x])])


def _embed(emit: Emit, call: Call, weight: str, token_ids: str) -> str:
    return emit("Gather", [weight, token_ids], axis=0)


def _rope(emit: Emit, call: Call, x: str, positions: str, table: str) -> str:
    dtype, turned, rest = call.dtypes["x"], call.sizes["R"], call.sizes["D"] - 2 * call.sizes["R"]
    angles = emit("Gather", [emit.cast(table, call.dtypes["table"], torch.float32), positions], axis=0)
    cos, sin = emit("Split", [angles, emit.constant(np.array([1, 1]))], 2, axis=1)  # [T, 1, R] each
    sizes = [turned, turned, rest] if rest else [turned, turned]
    wide = emit.cast(x, dtype, torch.float32)
    first, second, *kept = emit("Split", [wide, emit.constant(np.array(sizes))], len(sizes), axis=2)
    turned_first = emit("Sub", [emit("Mul", [first, cos]), emit("Mul", [second, sin])])
    turned_second = emit("Add", [emit("Mul", [second, cos]), emit("Mul", [first, sin])])
    return emit.cast(emit("Concat", [turned_first, turned_second, *kept], axis=2), torch.float32, dtype)


BODIES: dict[str, Callable[..., str]] = {
    "linear": _linear,
    "norm": _norm,
    "gate": _gate,
    "embed": _embed,
    "rope": _rope,
}
