"""The declaration of the gated delta rule."""

from hemiola.plugins.delta import chunk, reference
from hemiola.plugins.spec import FP32, ROWS, Arg, Attr, Op

# J is 1 (gated delta rule) or K (Kimi delta attention: a decay per channel).
DELTA = Op(
    name="delta",
    args=(
        Arg("q", "TGK"),
        Arg("k", "TGK"),
        Arg("v", "THV"),
        Arg("g", "THJ", FP32),
        Arg("beta", "TH", FP32),
        Arg("state", "SHKV", FP32, mutated=True),
        Arg("k_records", "SRGK", mutated=True),
        Arg("v_records", "SRHV", mutated=True),
        Arg("g_records", "SRHJ", FP32, mutated=True),
        Arg("beta_records", "SRH", FP32, mutated=True),
        *ROWS,
    ),
    attrs=(Attr("chunk_len", int),),
    result="THV",
    reference=reference.delta,
    in_torch=chunk.delta,
    lanes="KV",
)
