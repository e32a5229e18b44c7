"""Entries of the page table that changed."""

from hemiola.plugins.spec import INT, Arg, Op
from hemiola.plugins.step.change.reference import change as reference
from hemiola.plugins.step.declare import FORMS, LONG

CHANGE = Op(
    name="step.change",
    args=(Arg("changes", "E2", LONG), Arg("table", "SP", INT, mutated=True)),
    attrs=(),
    results=(),
    reference=reference,
    forms=FORMS,
)
