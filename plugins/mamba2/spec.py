"""The declaration of Mamba2's recurrence."""

from hemiola.plugins.mamba2.reference import mamba2 as reference
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
    in_groups,
    on_the_grid,
    one_dtype,
)

WIDE = ("dt_bias", "A", "D", "state", "dt_records")
HEADS = in_groups("H", "G")


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
        Form("compiled", "cpu", first_reason(fp32_in_sixteens("PD"), HEADS)),
        Form("cuda", "cuda", first_reason(on_the_grid("D"), one_dtype(WIDE), HEADS)),
    ),
)
