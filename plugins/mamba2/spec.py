"""The declaration of Mamba2's recurrence."""

from hemiola.plugins.mamba2.reference import mamba2 as reference
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

WIDE = ("dt_bias", "A", "D", "state", "dt_records")


def _refuses_on_cuda(call: Call) -> str:
    depth, chunk_len = call.sizes["D"], call.attrs["chunk_len"]
    if chunk_len not in (16, 32, 64):
        return f"chunk_len is {chunk_len}, not 16, 32 or 64"
    return f"D is {depth}, not a power of two from 16 up" if depth < 16 or depth & (depth - 1) else ""


# D is the state's width here; N is taken by the rows.
MAMBA2 = Op(
    name="mamba2",
    args=(
        Arg("x", "THP"),
        Arg("B", "TGD"),
        Arg("C", "TGD"),
        Arg("dt", "TH"),
        Arg("dt_bias", "H", FP32),
        Arg("A", "H", FP32),
        Arg("D", "H", FP32),
        Arg("state", "SHPD", FP32, mutated=True),
        Arg("x_records", "SRHP", mutated=True),
        Arg("B_records", "SRGD", mutated=True),
        Arg("dt_records", "SRH", FP32, mutated=True),
        ROWS,
    ),
    attrs=(Attr("chunk_len", int), Attr("dt_min", float), Attr("dt_max", float)),
    results=(Result("THP"),),
    reference=reference,
    forms=(
        Form("compiled", "cpu", fp32_in_sixteens("PD")),
        Form("triton", "cuda", first_reason(_refuses_on_cuda, bf16(WIDE))),
    ),
)
