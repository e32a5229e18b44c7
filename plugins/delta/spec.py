"""The declaration of the gated delta rule."""

from hemiola.plugins.delta.reference import delta as reference
from hemiola.plugins.spec import (
    FP32,
    ROWS,
    Arg,
    Attr,
    Form,
    Op,
    Result,
    first_reason,
    fp32_in_sixteens,
    on_the_grid,
    one_dtype,
)

WIDE = ("dt_bias", "A", "state", "g_records", "beta_records")


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
        Form("cuda", "cuda", first_reason(on_the_grid("K"), one_dtype(WIDE))),
    ),
)
