"""What users are told of tokens: how probable they and the best ones were."""

import torch

from hemiola.plugins.spec import FP32, Arg, Attr, Op, Result
from hemiola.plugins.step.declare import FORMS, LONG
from hemiola.plugins.step.logprobs.reference import logprobs as reference

LOGPROBS = Op(
    name="step.logprobs",
    args=(Arg("scores", "LV", FP32), Arg("token_ids", "L", LONG)),
    attrs=(Attr("num_top", int, "K"),),
    results=(Result("L", torch.float64), Result("LK", torch.int64), Result("LK", torch.float64)),
    reference=reference,
    forms=FORMS,
)
