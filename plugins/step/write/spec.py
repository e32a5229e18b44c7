"""A draft of each row."""

from hemiola.plugins.spec import Arg, Attr, Op
from hemiola.plugins.step.declare import FORMS, IDS, LENGTHS, LONG, PLAN
from hemiola.plugins.step.write.reference import write as reference

WRITE = Op(
    name="step.write",
    args=(PLAN, Arg("chosen", "D", LONG), LENGTHS, IDS),
    attrs=(Attr("number", int),),
    results=(),
    reference=reference,
    forms=FORMS,
)
