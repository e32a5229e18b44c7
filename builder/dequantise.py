"""Quantised weights of dense layers in ONNX: codes and scales as inputs of a graph, and DequantizeLinear.

A weight `X` becomes two: `X` itself, its codes, and `X.scales`, fp32 [O, F / span], or [O] for whole rows.
The layer multiplies code * scale, rounded to fp32 (groups.dequantised) and then to the engine's dtype.
"""

import torch
from onnx import TensorProto

from hemiola.builder.graph import Graph, op_of
from hemiola.builder.lazy import Lazy
from hemiola.plugins.groups import Layout, WeightGroup, factors

SCALES = ".scales"  # behind a weight's name
TYPES = {  # of codes; those of 4 bits lie two in a byte, the first in the lower half
    "e4m3": TensorProto.FLOAT8E4M3FN,
    "e2m1": TensorProto.FLOAT4E2M1,
    "int8": TensorProto.INT8,
    "int4": TensorProto.INT4,
}


def refuses_layout(layout: Layout, num_inputs: int) -> str:
    """Of what DequantizeLinear takes, or ""."""
    if "zeros" in layout.others:
        return "it has zero points"
    if layout.span and num_inputs % layout.span:
        return f"its {num_inputs} inputs are no multiple of {layout.span}, for which a scale is"
    if layout.kind in ("int4", "e2m1") and num_inputs % 2:
        return f"its {num_inputs} inputs are no pairs"
    return ""


def coded_weights(graph: Graph, weights: dict[str, Lazy]) -> dict[str, Layout]:
    """Layouts of the quantised weights of dense layers, by name."""
    names = dict(zip(graph.placeholders(), graph.weights, strict=False))
    layouts: dict[str, Layout] = {}
    for node in graph.program.graph.nodes:
        op = op_of(node)
        if op is not None and op.name == "linear":
            name = names[node.args[1]]
            if (layout := weights[name].layout) is not None:
                layouts[name] = layout
    return layouts


def stored(name: str, weight: Lazy) -> dict[str, Lazy]:
    """What stands for a quantised weight: codes as bytes, and scales."""
    return {name: weight.packed(_codes), name + SCALES: weight.packed(_scales)}


def _codes(group: WeightGroup) -> torch.Tensor:
    """[O, F], or [O, F / 2]."""
    codes = group.tensors["codes"].view(torch.uint8)
    if group.layout.kind in ("int4", "e2m1"):
        codes = codes[:, 0::2] & 15 | codes[:, 1::2] << 4
    return codes


def _scales(group: WeightGroup) -> torch.Tensor:
    scales = factors(group)
    return scales if group.layout.span else scales[:, 0].clone()
