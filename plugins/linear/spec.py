"""The dense layer whose rows do not feel their neighbours."""

import torch

from hemiola.plugins.groups import Layout, WeightGroup
from hemiola.plugins.linear.reference import linear as reference
from hemiola.plugins.spec import Arg, Form, Op, Result, fp32_in_sixteens, one_dtype


def strips(weight: torch.Tensor | WeightGroup) -> torch.Tensor:
    """The layout in which compiled forms read a weight [..., O, F]; bfloat16 and codes stay so."""
    from hemiola.plugins.linear.compiled import pack

    return pack(weight)


def refuses_layout(layout: Layout) -> str:
    """Of what `strips` takes apart."""
    return f"a scale for {layout.span} inputs, no multiple of 16" if layout.span % 16 else ""


LINEAR = Op(
    name="linear",
    args=(
        Arg("x", "TF"),
        Arg("weight", "OF"),
        Arg("bias", "O*"),
    ),
    attrs=(),
    results=(Result("TO"),),
    reference=reference,
    forms=(
        Form("compiled", "cpu", fp32_in_sixteens(""), {"weight": strips}, "O", refuses_layout),
        Form("cuda", "cuda", one_dtype()),
    ),
    by_line=True,
)
