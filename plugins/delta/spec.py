"""The declaration of the gated delta rule."""

from hemiola.plugins.delta.reference import delta as reference
from hemiola.plugins.spec import (
    FP32,
    ROWS,
    Arg,
    Attr,
    Call,
    Form,
    Op,
    Result,
    bf16,
    first_reason,
    fp32_in_sixteens,
)

WIDE = ("dt_bias", "A", "state", "g_records", "beta_records")


def _refuses_on_cuda(call: Call) -> str:
    depth, chunk_len = call.sizes["K"], call.attrs["chunk_len"]
    if chunk_len not in (16, 32, 64):
        return f"chunk_len is {chunk_len}, not 16, 32 or 64"
    return f"K is {depth}, not a power of two from 16 up" if depth < 16 or depth & (depth - 1) else ""


# J is 1 (gated delta rule) or K (Kimi delta attention: a decay per channel).
DELTA = Op(
    name="delta",
    args=(
        Arg("q", "TGK"),
        Arg("k", "TGK"),
        Arg("v", "THV"),
        Arg("a", "THJ"),
        Arg("b", "TH"),
        Arg("dt_bias", "HJ", FP32),
        Arg("A", "H", FP32),
        Arg("state", "SHKV", FP32, mutated=True),
        Arg("k_records", "SRGK", mutated=True),
        Arg("v_records", "SRHV", mutated=True),
        Arg("g_records", "SRHJ", FP32, mutated=True),
        Arg("beta_records", "SRH", FP32, mutated=True),
        ROWS,
    ),
    attrs=(Attr("chunk_len", int),),
    results=(Result("THV"),),
    reference=reference,
    forms=(
        Form("compiled", "cpu", fp32_in_sixteens("KV")),
        Form("triton", "cuda", first_reason(_refuses_on_cuda, bf16(WIDE))),
    ),
)
