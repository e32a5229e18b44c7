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
    first_reason,
    fp32_in_sixteens,
    in_groups,
    on_the_grid,
    one_dtype,
)

WIDE = ("dt_bias", "A", "state", "g_records", "beta_records")


def _refuses_decays(call: Call) -> str:
    decays, depth = call.sizes["J"], call.sizes["K"]
    return "" if decays in (1, depth) else f"J is {decays}, not 1 or K {depth}"


HEADS = first_reason(in_groups("H", "G"), _refuses_decays)


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
        Form("compiled", "cpu", first_reason(fp32_in_sixteens("KV"), HEADS)),
        Form("cuda", "cuda", first_reason(on_the_grid("K"), one_dtype(WIDE), HEADS)),
    ),
)
