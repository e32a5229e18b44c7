"""The token of each line that draws."""

import torch

from hemiola.plugins.spec import FP32, Arg, Attr, Op, Result
from hemiola.plugins.step.declare import FORMS, LONG
from hemiola.plugins.step.draw.reference import draw as reference

WIDE = (torch.float64,)
DRAW = Op(
    name="step.draw",
    args=(
        Arg("scores", "LV", FP32),
        Arg("temperature", "L1", WIDE),
        Arg("min_p", "L1", WIDE),
        Arg("top_p", "L1", WIDE),
        Arg("top_k", "L1", LONG),
        Arg("seed", "L2", LONG),
        Arg("greedy", "L", (torch.bool,)),
        Arg("position", "L", LONG),
    ),
    attrs=(Attr("has_min_p", bool), Attr("most", int)),
    results=(Result("L", torch.int64),),
    reference=reference,
    forms=FORMS,
)
