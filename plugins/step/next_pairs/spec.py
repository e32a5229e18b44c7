"""What a drafting head reads to bring one more draft."""

import torch

from hemiola.plugins.spec import Attr, Op, Result
from hemiola.plugins.step.declare import FORMS, IDS, LENGTHS, PLAN
from hemiola.plugins.step.next_pairs.reference import next_pairs as reference

NEXT_PAIRS = Op(
    name="step.next_pairs",
    args=(PLAN, LENGTHS, IDS),
    attrs=(Attr("number", int), Attr("num_drafting", int, "D")),
    results=(Result("N8", torch.int32), Result("D", torch.int32), Result("D", torch.int32)),
    reference=reference,
    forms=FORMS,
)
