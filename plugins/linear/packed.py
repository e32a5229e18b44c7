"""What dense layers over packed weights share: where outputs go, whoever multiplies."""

from collections.abc import Callable
from typing import Any

import torch

from hemiola.plugins.gpu.checks import check
from hemiola.plugins.gpu.dtypes import FLOATS
from hemiola.plugins.gpu.launch import cdiv
from hemiola.plugins.linear.cuda import ACTIVATIONS, choose_best

# Writes outputs, or with argmax the values of a tile's best ones and these; and what ends them.
Launch = Callable[[torch.Tensor, torch.Tensor | None, str], None]


def ended(
    x: torch.Tensor,  # [T, F]
    num_outputs: int,  # O
    residual: torch.Tensor | None,  # [T, O], or [T, O / 2] with swiglu
    ending: str,
    part: int,  # outputs of a tile, with argmax
    launch: Launch,
) -> Any:  # [T, O]; with swiglu [T, O / 2]; with argmax [T] fp32, [T] int64
    """residual + activation(x @ weight.T + bias), in fp32 until the end; or the highest output, in x's dtype,
    and the lowest output that has it, none being stored."""
    num_tokens, activation = x.shape[0], ending or "none"
    if activation == "argmax":
        num_parts = cdiv(num_outputs, part)
        values = torch.empty(num_parts, num_tokens, dtype=torch.float32, device=x.device)
        outputs = torch.empty(num_parts, num_tokens, dtype=torch.int32, device=x.device)
        if num_tokens:
            launch(values, outputs, activation)
        return choose_best(values, outputs)
    if activation not in ACTIVATIONS:
        raise ValueError(f"linear: activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    if activation == "swiglu" and num_outputs % 16:
        raise ValueError(f"linear: {num_outputs} outputs are not eight gates, eight values, and so on")
    width = num_outputs // 2 if activation == "swiglu" else num_outputs
    if residual is not None:
        check("linear", "residual", residual, (num_tokens, width), FLOATS, x.device, 1, True)
    y = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if y.numel():
        launch(y, None, activation)
    return y
