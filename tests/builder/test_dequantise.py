"""Quantised weights in ONNX: what DequantizeLinear makes of stored codes are the format's own numbers."""

import numpy as np
import onnx
import pytest
import torch
from kit.ops import same_bits
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from hemiola.builder.dequantise import SCALES, TYPES, refuses_layout, stored
from hemiola.builder.lazy import Lazy, LazyGroup
from hemiola.plugins.groups import Layout, dequantised
from tests.plugins.linear.test_codes import make

LAYOUTS = [
    Layout("e4m3", 128), Layout("e4m3", 0), Layout("e2m1", 16, ("factor",)), Layout("e2m1", 16, ("divisor",)),
    Layout("int8", 0), Layout("int8", 32), Layout("int4", 128), Layout("int4", 32), Layout("int4", 0),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_onnx_finds_the_numbers_of_the_format(layout: Layout) -> None:
    """By ONNX's own evaluator: every code, scales far apart."""
    group, shape = make(layout, 24, 256), (24, 256)
    made = stored("X", Lazy.quantised(shape, LazyGroup(layout, lambda: group)))
    codes, scales = (made[name].read() for name in ("X", f"X{SCALES}"))
    assert (codes.shape, codes.dtype) == (made["X"].shape, torch.uint8) and not refuses_layout(layout, 256)
    how = {"axis": 1, "block_size": layout.span} if layout.span else {"axis": 0}
    tensors = [
        helper.make_tensor("X", TYPES[layout.kind], shape, codes.numpy().tobytes(), raw=True),
        helper.make_tensor("S", TensorProto.FLOAT, scales.shape, scales.numpy().tobytes(), raw=True),
    ]
    node, result = helper.make_node("DequantizeLinear", ["X", "S"], ["y"], **how), TensorProto.FLOAT
    graph = helper.make_graph([node], "one", [], [helper.make_tensor_value_info("y", result, shape)], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    onnx.checker.check_model(model, full_check=True)
    (found,) = ReferenceEvaluator(model).run(None, {})
    assert same_bits(torch.from_numpy(np.asarray(found, np.float32)), dequantised(group))


@pytest.mark.parametrize(
    "layout, num_inputs, said",
    [
        (Layout("int4", 32, ("zeros",)), 64, "it has zero points"),
        (Layout("e4m3", 128), 192, "its 192 inputs are no multiple of 128"),
        (Layout("int4", 0), 33, "its 33 inputs are no pairs"),
    ],
    ids=str,
)
def test_what_it_does_not_take(layout: Layout, num_inputs: int, said: str) -> None:
    assert refuses_layout(layout, num_inputs).startswith(said)
