"""All logits of a line, where every rank has those of its part of the vocabulary."""

from hemiola.plugins.spec import FP32, Arg, Op, Result
from hemiola.plugins.step.declare import FORMS
from hemiola.plugins.step.gather.reference import gather as reference
from hemiola.plugins.sum.spec import GROUP

GATHER = Op(
    name="step.gather",
    args=(Arg("logits", "LV", FP32), GROUP),
    attrs=(),
    results=(Result("LW"),),
    reference=reference,
    forms=FORMS,
)
