"""RMS norm over groups of channels, with an optional gate."""

from hemiola.plugins.norm.cpu import norm as in_torch
from hemiola.plugins.norm.reference import norm as reference
from hemiola.plugins.spec import Arg, Attr, Op

NORM = Op(
    name="norm",
    args=(
        Arg("x", "TW"),
        Arg("gate", "TW*"),
        Arg("weight", "W"),
    ),
    attrs=(
        Attr("eps", float),
        Attr("group_len", int),
        Attr("gate_first", bool),
    ),
    result="TW",
    reference=reference,
    in_torch=in_torch,
    lanes="W",
)
