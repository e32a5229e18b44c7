"""What a drafting head reads first."""

import torch

from hemiola.plugins.spec import INT, Arg, Attr, Op, Result
from hemiola.plugins.step.declare import FORMS, IDS, LENGTHS, PLAN
from hemiola.plugins.step.first_pairs.reference import first_pairs as reference

FIRST_PAIRS = Op(
    name="step.first_pairs",
    args=(PLAN, Arg("rows", "N8", INT), Arg("hidden", "TF"), Arg("ring", "SRF"), LENGTHS, IDS),
    attrs=(Attr("num_pairs", int, "P"), Attr("num_drafting", int, "D")),
    results=(
        Result("N8", torch.int32),
        Result("P", torch.int32),
        Result("PF"),
        Result("P", torch.int32),
        Result("D", torch.int32),
        Result("D", torch.int64),
    ),
    reference=reference,
    forms=FORMS,
)
