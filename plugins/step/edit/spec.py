"""What changes logits before a token is chosen: bad words, min_tokens, logit_bias, penalties."""

import torch

from hemiola.plugins.spec import FP32, INT, Arg, Op, Result
from hemiola.plugins.step.declare import FORMS, LONG
from hemiola.plugins.step.edit.reference import edit as reference

EDIT = Op(
    name="step.edit",
    args=(
        Arg("scores", "LV", FP32),
        Arg("prompt_len", "L", LONG),
        Arg("min_tokens", "L", LONG),
        Arg("stop_ids", "LA", LONG),
        Arg("biased", "LD", LONG),
        Arg("biases", "LD", FP32),
        Arg("lasts", "LB", LONG),
        Arg("before", "LE", INT),
        Arg("back", "LE", INT),
        Arg("word", "LE", INT),
        Arg("penalties", "LP1", FP32),
        Arg("slot", "L", LONG),
        Arg("position", "L", LONG),
        Arg("ids", "SW", INT),
    ),
    attrs=(),
    results=(Result("LV", torch.float32),),
    reference=reference,
    forms=FORMS,
)
