"""Rotary positions, from a table that the builder computes: every device turns by the same numbers."""

from hemiola.plugins.rope.reference import rope as reference
from hemiola.plugins.spec import INT, Arg, Call, Form, Op, Result, first_reason, fp32_in_sixteens, one_dtype


def _refuses(call: Call) -> str:
    if 2 * call.sizes["R"] > call.sizes["D"]:
        return f"{call.sizes['R']} pairs do not fit into {call.sizes['D']} channels"
    return ""


ROPE = Op(
    name="rope",
    args=(Arg("x", "THD"), Arg("positions", "T", INT), Arg("table", "M2R")),
    attrs=(),
    results=(Result("THD"),),
    reference=reference,
    forms=(
        Form("compiled", "cpu", first_reason(_refuses, fp32_in_sixteens(""))),
        Form("cuda", "cuda", first_reason(_refuses, one_dtype(wide=["table"]))),
    ),
)
