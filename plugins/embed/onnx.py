"""embed in operators of ONNX."""

from hemiola.plugins.onnx import Emit
from hemiola.plugins.spec import Call


def body(emit: Emit, call: Call, weight: str, token_ids: str) -> str:
    return emit("Gather", [weight, token_ids], axis=0)
