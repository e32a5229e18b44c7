"""The best token of each line of logits."""

import torch

from hemiola.plugins.spec import FP32, Arg, Op, Result
from hemiola.plugins.step.best.reference import best as reference
from hemiola.plugins.step.declare import FORMS

BEST = Op(
    name="step.best",
    args=(Arg("logits", "LV", FP32),),
    attrs=(),
    results=(Result("L", torch.float32), Result("L", torch.int64)),
    reference=reference,
    forms=FORMS,
)
