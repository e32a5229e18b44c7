"""When a step's device came to a place."""

from hemiola.plugins.spec import Arg, Attr, Op
from hemiola.plugins.step.declare import FORMS, LONG
from hemiola.plugins.step.mark.reference import mark as reference

MARK = Op(
    name="step.mark",
    args=(Arg("times", "A", LONG, mutated=True),),
    attrs=(Attr("place", int),),
    results=(),
    reference=reference,
    forms=FORMS,
)
