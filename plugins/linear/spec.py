"""The dense layer whose rows do not feel their neighbours."""

from hemiola.plugins.linear.cpu import linear as in_torch
from hemiola.plugins.linear.reference import linear as reference
from hemiola.plugins.spec import Arg, Op

LINEAR = Op(
    name="linear",
    args=(
        Arg("x", "TF"),
        Arg("weight", "OF"),
        Arg("bias", "O*"),
    ),
    attrs=(),
    result="TO",
    reference=reference,
    in_torch=in_torch,
)
