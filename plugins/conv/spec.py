"""The declaration of the causal depthwise convolution."""

import torch

from hemiola.plugins.conv.reference import conv as reference
from hemiola.plugins.spec import ROWS, Arg, Attr, Form, Op, Result, fp32_in_sixteens, one_dtype


def taps(weight: torch.Tensor) -> torch.Tensor:
    """[E, W] as [W, E]: a tap's channels side by side."""
    return weight.float().T.contiguous()


CONV = Op(
    name="conv",
    args=(
        Arg("x", "TE"),
        Arg("weight", "EW"),
        Arg("bias", "E"),
        Arg("columns", "SRE", mutated=True),
        ROWS,
    ),
    attrs=(Attr("chunk_len", int),),
    results=(Result("TE"),),
    reference=reference,
    forms=(
        Form("compiled", "cpu", fp32_in_sixteens("E"), {"weight": taps}),
        Form("cuda", "cuda", one_dtype()),
    ),
)
