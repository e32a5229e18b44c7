"""A step's inputs, from its plan and the ledger."""

import torch

from hemiola.plugins.spec import INT, Arg, Attr, Op, Result
from hemiola.plugins.step.declare import FORMS, IDS, LENGTHS, PLAN
from hemiola.plugins.step.fill.reference import fill as reference

FILL = Op(
    name="step.fill",
    args=(PLAN, Arg("table", "SP", INT), LENGTHS, IDS),
    attrs=(Attr("num_tokens", int, "T"), Attr("num_lines", int, "L")),
    results=(
        Result("N8", torch.int32),
        Result("NP", torch.int32),
        Result("T", torch.int32),
        Result("T", torch.int32),
        Result("L", torch.int32),
        Result("L", torch.int64),
        Result("L", torch.int64),
    ),
    reference=reference,
    forms=FORMS,
)
