"""The dense layer whose rows do not feel their neighbours."""

import torch

from hemiola.plugins.gpu import words
from hemiola.plugins.gpu.lines import pack_lines, refuses_wide
from hemiola.plugins.gpu.words import pack_words
from hemiola.plugins.groups import Layout, WeightGroup
from hemiola.plugins.inputs import WIDE_INPUTS
from hemiola.plugins.linear.reference import linear as reference
from hemiola.plugins.spec import (
    Arg,
    Form,
    Op,
    Result,
    first_reason,
    fp32_in_sixteens,
    one_dtype,
    quantised,
)

CODED = first_reason(quantised("weight"), one_dtype())


def strips(weight: torch.Tensor | WeightGroup) -> torch.Tensor:
    """The layout in which compiled forms read a weight [..., O, F]; bfloat16 and codes stay so."""
    from hemiola.plugins.linear.compiled import pack

    return pack(weight)


def refuses_layout(layout: Layout) -> str:
    """Of what `strips` takes apart, for inputs that stay wide."""
    if layout.inputs:
        return WIDE_INPUTS
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
        Form(
            "compiled",
            "cpu",
            fp32_in_sixteens(""),
            {"weight": strips},
            "O",
            refuses_layout,
            options=("residual",),
        ),
        Form(
            "compiled_e4m3",
            "cpu",
            first_reason(quantised("weight"), fp32_in_sixteens("")),
            {"weight": strips},
            "O",
            refuses_wide,
            options=("residual",),
        ),
        Form("cuda", "cuda", one_dtype()),
        Form("coded", "cuda", CODED, {"weight": pack_words}, "O", words.refuses_layout),
        Form("e4m3", "cuda", CODED, {"weight": pack_lines}, "O", refuses_wide),
    ),
    options=(Arg("residual", "TO"),),  # builder/passes/sums.py
    by_line=True,
)
