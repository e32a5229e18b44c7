"""norm in operators of ONNX."""

import numpy as np
import torch

from hemiola.plugins.onnx import Emit, silu
from hemiola.plugins.spec import Call


def body(emit: Emit, call: Call, x: str, gate: str, weight: str) -> str:
    attrs, dtype, width = call.attrs, call.dtypes["x"], call.sizes["W"]
    y, opening, group_len = emit.cast(x, dtype, torch.float32), "", attrs["group_len"]
    if "gate" in call.dtypes:
        opening = silu(emit, emit.cast(gate, call.dtypes["gate"], torch.float32))
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
