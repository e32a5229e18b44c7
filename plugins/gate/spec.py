"""A gate on every channel: what SwiGLU, gated attention and a shared expert end with."""

from hemiola.plugins.gate.reference import gate as reference
from hemiola.plugins.spec import Arg, Attr, Call, Form, Op, Result, first_reason, fp32_in_sixteens, one_dtype


def _refuses(call: Call) -> str:
    if call.attrs["kind"] not in ("silu", "sigmoid"):
        return f"kind is {call.attrs['kind']!r}, not silu or sigmoid"
    if call.sizes["J"] not in (1, call.sizes["E"]):
        return f"the gate has {call.sizes['J']} channels, x has {call.sizes['E']}"
    return ""


GATE = Op(
    name="gate",
    args=(Arg("x", "TE"), Arg("gate", "TJ")),
    attrs=(Attr("kind", str),),
    results=(Result("TE"),),
    reference=reference,
    forms=(
        Form("compiled", "cpu", first_reason(_refuses, fp32_in_sixteens("E"))),
        Form("cuda", "cuda", first_reason(_refuses, one_dtype())),
    ),
    by_line=True,
)
