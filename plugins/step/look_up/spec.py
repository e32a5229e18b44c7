"""Drafts by prompt lookup."""

from hemiola.plugins.spec import Attr, Op
from hemiola.plugins.step.declare import FORMS, IDS, LENGTHS, PLAN
from hemiola.plugins.step.look_up.reference import look_up as reference

LOOK_UP = Op(
    name="step.look_up",
    args=(PLAN, LENGTHS, IDS),
    attrs=(Attr("min_n", int), Attr("max_n", int)),
    results=(),
    reference=reference,
    forms=FORMS,
)
