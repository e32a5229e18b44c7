"""linear in operators of ONNX."""

from hemiola.plugins.onnx import Emit
from hemiola.plugins.spec import Call


def body(emit: Emit, call: Call, x: str, weight: str, bias: str) -> str:
    return emit("Gemm", [x, weight, *([bias] if "bias" in call.dtypes else [])], transB=1)
