"""What was proposed, for the host."""

from hemiola.plugins.spec import Arg, Attr, Op
from hemiola.plugins.step.declare import FORMS, IDS, LENGTHS, LONG, PLAN
from hemiola.plugins.step.tell.reference import tell as reference

TELL = Op(
    name="step.tell",
    args=(PLAN, LENGTHS, IDS, Arg("answers", "NA", LONG, mutated=True)),
    attrs=(Attr("width", int), Attr("most", int)),
    results=(),
    reference=reference,
    forms=FORMS,
)
