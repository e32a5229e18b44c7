"""What a drafting head will read later."""

from hemiola.plugins.spec import INT, Arg, Op
from hemiola.plugins.step.declare import FORMS, LENGTHS
from hemiola.plugins.step.keep.reference import keep as reference

KEEP = Op(
    name="step.keep",
    args=(Arg("rows", "N8", INT), LENGTHS, Arg("hidden", "TF"), Arg("ring", "SRF", mutated=True)),
    attrs=(),
    results=(),
    reference=reference,
    forms=FORMS,
)
