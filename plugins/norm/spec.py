"""RMS norm over groups of channels, with an optional gate."""

from hemiola.plugins.norm.reference import norm as reference
from hemiola.plugins.spec import Arg, Attr, Call, Form, Op, Result, first_reason, fp32_in_sixteens, one_dtype


def _refuses(call: Call) -> str:
    width, group_len = call.sizes["W"], call.attrs["group_len"]
    if group_len <= 0 or width % group_len:
        return f"group_len is {group_len}, which does not divide the width {width}"
    return ""


def _refuses_on_cpu(call: Call) -> str:
    width, group_len = call.sizes["W"], call.attrs["group_len"]
    if group_len <= 0 or group_len % 16 or width % group_len:
        return f"group_len is {group_len}, not a multiple of 16 that divides the width {width}"
    return ""


NORM = Op(
    name="norm",
    args=(
        Arg("x", "TW"),
        Arg("gate", "TW*"),
        Arg("weight", "W"),
    ),
    attrs=(
        Attr("eps", float),
        Attr("group_len", int),
        Attr("gate_first", bool),
    ),
    results=(Result("TW"),),
    reference=reference,
    forms=(
        Form("compiled", "cpu", first_reason(_refuses_on_cpu, fp32_in_sixteens("W"))),
        Form("cuda", "cuda", first_reason(_refuses, one_dtype(wide=["weight"]))),
    ),
    by_line=True,
)
