"""A mixture of experts after its router: two dense layers per used expert, combined in slot order."""

from hemiola.plugins.gpu import words
from hemiola.plugins.gpu.lines import pack_lines, refuses_wide
from hemiola.plugins.gpu.words import pack_words
from hemiola.plugins.inputs import refuses_inputs
from hemiola.plugins.linear.spec import refuses_layout, strips
from hemiola.plugins.moe.reference import moe as reference
from hemiola.plugins.spec import (
    FP32,
    INT,
    Arg,
    Attr,
    Call,
    Form,
    Op,
    Result,
    first_reason,
    fp32_in_sixteens,
    one_dtype,
    quantised,
)

ACTIVATIONS = {"relu2": 1, "swiglu": 2}  # and how many outputs of `up` make one input of `down`


def _refuses(call: Call) -> str:
    activation = call.attrs["activation"]
    if activation not in ACTIVATIONS:
        return f"activation is {activation!r}, not {' or '.join(ACTIVATIONS)}"
    if call.sizes["J"] != call.sizes["I"] * ACTIVATIONS[activation]:
        return f"up has {call.sizes['J']} outputs, down {call.sizes['I']} inputs; not so after {activation}"
    return ""


_ON_CUDA = first_reason(_refuses, one_dtype(wide=["expert_weights"]))

MOE = Op(
    name="moe",
    args=(
        Arg("x", "TF"),
        Arg("expert_ids", "TK", INT),
        Arg("expert_weights", "TK", FP32),
        Arg("up", "EJF"),  # J = I for relu2, 2I for swiglu (gate rows first)
        Arg("down", "EFI"),
    ),
    attrs=(Attr("activation", str),),
    results=(Result("TF"),),
    reference=reference,
    forms=(
        Form(
            "compiled",
            "cpu",
            first_reason(_refuses, fp32_in_sixteens("")),
            {"up": strips, "down": strips},
            "I",
            lambda layout: refuses_inputs(layout) if layout.inputs else refuses_layout(layout),
        ),
        Form("cuda", "cuda", _ON_CUDA),
        Form(
            "coded",
            "cuda",
            first_reason(quantised("up", "down"), _ON_CUDA),
            {"up": pack_words, "down": pack_words},
            "I",
            words.refuses_layout,
        ),
        Form(
            "e4m3",
            "cuda",
            first_reason(quantised("up", "down"), _ON_CUDA),
            {"up": pack_lines, "down": pack_lines},
            "I",
            refuses_wide,
        ),
    ),
    by_line=True,
)
