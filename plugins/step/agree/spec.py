"""The best token of each line, where every rank knows the best of its part of the vocabulary."""

import torch

from hemiola.plugins.spec import FP32, Arg, Attr, Op, Result
from hemiola.plugins.step.agree.reference import agree as reference
from hemiola.plugins.step.declare import FORMS, LONG
from hemiola.plugins.sum.spec import GROUP

AGREE = Op(
    name="step.agree",
    args=(Arg("logit", "L", FP32), Arg("token_id", "L", LONG), GROUP),
    attrs=(Attr("width", int),),
    results=(Result("L", torch.float32), Result("L", torch.int64)),
    reference=reference,
    forms=FORMS,
)
