"""The dense layer whose rows do not feel their neighbours, and what follows it, rounded once.

The builder puts an ending in the place of the calls that it does the work of (builder/passes/fuse.py): one
call, and what is between is neither stored nor rounded.
"""

import torch

from hemiola.plugins.gpu import words
from hemiola.plugins.gpu.lines import pack_lines, refuses_wide
from hemiola.plugins.gpu.words import pack_words
from hemiola.plugins.groups import Layout, WeightGroup
from hemiola.plugins.inputs import WIDE_INPUTS
from hemiola.plugins.linear.reference import EIGHT
from hemiola.plugins.linear.reference import linear as reference
from hemiola.plugins.spec import (
    Arg,
    Call,
    Ending,
    Form,
    Op,
    Result,
    first_reason,
    fp32_in_sixteens,
    one_dtype,
    quantised,
)

CODED = first_reason(quantised("weight"), one_dtype())
ON_GPUS = {"options": ("residual",), "endings": ("relu2", "swiglu", "argmax")}


def strips(weight: torch.Tensor | WeightGroup) -> torch.Tensor:
    """The layout in which compiled forms read a weight [..., O, F]; bfloat16 and codes stay so."""
    from hemiola.plugins.linear.compiled import pack

    return pack(weight)


def by_eights(weight: torch.Tensor) -> torch.Tensor:
    """All gates, then all values [O, F], in the order in which `swiglu` reads them."""
    return weight.unflatten(0, (2, -1, EIGHT)).transpose(0, 1).flatten(0, 2)


def refuses_layout(layout: Layout) -> str:
    """Of what `strips` takes apart, for inputs that stay wide."""
    if layout.inputs:
        return WIDE_INPUTS
    return f"a scale for {layout.span} inputs, no multiple of 16" if layout.span % 16 else ""


def _refuses_halves(call: Call) -> str:
    outputs = call.sizes["O"]
    return f"{outputs} outputs are not eight gates, eight values, and so on" if outputs % (2 * EIGHT) else ""


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
        Form("cuda", "cuda", one_dtype(), **ON_GPUS),
        Form("coded", "cuda", CODED, {"weight": pack_words}, "O", words.refuses_layout, **ON_GPUS),
        Form("e4m3", "cuda", CODED, {"weight": pack_lines}, "O", refuses_wide, **ON_GPUS),
    ),
    options=(Arg("residual", "TO"),),
    by_line=True,
    endings=(
        Ending("relu2", (Result("TO"),)),
        Ending("swiglu", (Result("TO", divisor=2),), _refuses_halves),
        Ending("argmax", (Result("T", torch.float32), Result("T", torch.int64))),
    ),
)
