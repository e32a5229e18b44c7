"""The declaration of the causal depthwise convolution."""

from hemiola.plugins.conv import cpu, reference
from hemiola.plugins.spec import ROWS, Arg, Attr, Op

CONV = Op(
    name="conv",
    args=(
        Arg("x", "TE"),
        Arg("weight", "EW"),
        Arg("bias", "E"),
        Arg("columns", "SRE", mutated=True),
        *ROWS,
    ),
    attrs=(Attr("chunk_len", int),),
    result="TE",
    reference=reference.conv,
    in_torch=cpu.conv,
    lanes="E",
)
