"""The declaration of Mamba2's recurrence."""

from hemiola.plugins.mamba2 import chunk, reference
from hemiola.plugins.spec import FP32, ROWS, Arg, Attr, Op

# D is the state's width here; N is taken by the rows.
MAMBA2 = Op(
    name="mamba2",
    args=(
        Arg("x", "THP"),
        Arg("B", "TGD"),
        Arg("C", "TGD"),
        Arg("dt", "TH", FP32),
        Arg("A", "H", FP32),
        Arg("D", "H", FP32),
        Arg("state", "SHPD", FP32, mutated=True),
        Arg("x_records", "SRHP", mutated=True),
        Arg("B_records", "SRGD", mutated=True),
        Arg("dt_records", "SRH", FP32, mutated=True),
        *ROWS,
    ),
    attrs=(Attr("chunk_len", int),),
    result="THP",
    reference=reference.mamba2,
    in_torch=chunk.mamba2,
    lanes="PD",
)
