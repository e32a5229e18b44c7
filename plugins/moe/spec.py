"""A mixture of experts after its router: two dense layers per used expert, combined in slot order."""

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
)

ACTIVATIONS = {"relu2": 1, "swiglu": 2}  # and how many outputs of `up` make one input of `down`


def _refuses(call: Call) -> str:
    activation = call.attrs["activation"]
    if activation not in ACTIVATIONS:
        return f"activation is {activation!r}, not {' or '.join(ACTIVATIONS)}"
    if call.sizes["J"] != call.sizes["I"] * ACTIVATIONS[activation]:
        return f"up has {call.sizes['J']} outputs, down {call.sizes['I']} inputs; not so after {activation}"
    return ""


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
            refuses_layout,
        ),
        Form("cuda", "cuda", first_reason(_refuses, one_dtype(wide=["expert_weights"]))),
    ),
    by_line=True,
)
