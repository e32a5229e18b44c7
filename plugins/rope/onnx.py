"""rope in operators of ONNX."""

import numpy as np
import torch

from hemiola.plugins.onnx import Emit
from hemiola.plugins.spec import Call


def body(emit: Emit, call: Call, x: str, positions: str, table: str) -> str:
    dtype, turned, rest = call.dtypes["x"], call.sizes["R"], call.sizes["D"] - 2 * call.sizes["R"]
    angles = emit("Gather", [emit.cast(table, call.dtypes["table"], torch.float32), positions], axis=0)
    cos, sin = emit("Split", [angles, emit.constant(np.array([1, 1]))], 2, axis=1)  # [T, 1, R] each
    sizes = [turned, turned, rest] if rest else [turned, turned]
    wide = emit.cast(x, dtype, torch.float32)
    first, second, *kept = emit("Split", [wide, emit.constant(np.array(sizes))], len(sizes), axis=2)
    turned_first = emit("Sub", [emit("Mul", [first, cos]), emit("Mul", [second, sin])])
    turned_second = emit("Add", [emit("Mul", [second, cos]), emit("Mul", [first, sin])])
    return emit.cast(emit("Concat", [turned_first, turned_second, *kept], axis=2), torch.float32, dtype)
