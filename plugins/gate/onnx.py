"""gate in operators of ONNX."""

import torch

from hemiola.plugins.onnx import Emit, silu
from hemiola.plugins.spec import Call


def body(emit: Emit, call: Call, x: str, gate: str) -> str:
    dtype = call.dtypes["x"]
    wide, opening = (emit.cast(v, call.dtypes[n], torch.float32) for n, v in (("x", x), ("gate", gate)))
    opening = silu(emit, opening) if call.attrs["kind"] == "silu" else emit("Sigmoid", [opening])
    return emit.cast(emit("Mul", [wide, opening]), torch.float32, dtype)
