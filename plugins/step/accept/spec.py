"""Which drafts stay, and the token behind them."""

from hemiola.plugins.spec import FP32, Arg, Attr, Op
from hemiola.plugins.step.accept.reference import accept as reference
from hemiola.plugins.step.declare import FORMS, IDS, LENGTHS, LONG, PLAN

ACCEPT = Op(
    name="step.accept",
    args=(
        PLAN,
        Arg("chosen", "L", LONG),
        Arg("logit", "L", FP32),
        LENGTHS,
        IDS,
        Arg("answers", "NA", LONG, mutated=True),
    ),
    attrs=(Attr("width", int), Attr("chunk_len", int)),
    results=(),
    reference=reference,
    forms=FORMS,
)
