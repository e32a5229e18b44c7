"""The dense layer and what follows it, rounded once: an activation, and a sum with what was there before.

The builder puts it in the place of such calls in engines for GPUs (builder/passes/fuse.py): one launch, and
what is between is neither stored nor rounded.
"""

import torch

from hemiola.plugins.fused_linear.reference import ACTIVATIONS, EIGHT
from hemiola.plugins.fused_linear.reference import fused_linear as reference
from hemiola.plugins.gpu.lines import pack_lines, refuses_wide
from hemiola.plugins.gpu.words import pack_words, refuses_layout
from hemiola.plugins.linear.spec import CODED
from hemiola.plugins.spec import Arg, Attr, Call, Form, Op, Result, first_reason, one_dtype


def by_eights(weight: torch.Tensor) -> torch.Tensor:
    """All gates, then all values [O, F], in the order in which `swiglu` reads them."""
    return weight.unflatten(0, (2, -1, EIGHT)).transpose(0, 1).flatten(0, 2)


def _refuses(call: Call) -> str:
    kind, outputs, width = call.attrs["activation"], call.sizes["O"], call.sizes["D"]
    if kind not in ACTIVATIONS:
        return f"activation is {kind!r}, not one of {', '.join(ACTIVATIONS)}"
    if outputs != (2 * width if kind == "swiglu" else width):
        return f"{outputs} outputs do not end as {width} with {kind}"
    if kind == "swiglu" and width % EIGHT:
        return f"{width} gates are no multiple of {EIGHT}"
    return ""


FUSED_LINEAR = Op(
    name="fused_linear",
    args=(
        Arg("x", "TF"),
        Arg("weight", "OF"),
        Arg("bias", "O*"),
        Arg("residual", "TD*"),
    ),
    attrs=(Attr("activation", str), Attr("width", int, "D")),
    results=(Result("TD"),),
    reference=reference,
    forms=(
        Form("cuda", "cuda", first_reason(_refuses, one_dtype())),
        Form("coded", "cuda", first_reason(_refuses, CODED), {"weight": pack_words}, "O", refuses_layout),
        Form("e4m3", "cuda", first_reason(_refuses, CODED), {"weight": pack_lines}, "O", refuses_wide),
    ),
    is_fusion=True,
)
