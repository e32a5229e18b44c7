"""A mixture of experts after its router: two GEMMs per used expert, combined in slot order."""

from hemiola.plugins.moe.cpu import moe as in_torch
from hemiola.plugins.moe.reference import moe as reference
from hemiola.plugins.spec import FP32, INT, Arg, Attr, Op

MOE = Op(
    name="moe",
    args=(
        Arg("x", "TF"),
        Arg("expert_ids", "TK", INT),
        Arg("expert_weights", "TK", FP32),
        Arg("up", "EJF"),  # J = I for relu2, 2I for swiglu (gate rows first)
        Arg("down", "EFI"),
    ),
    attrs=(
        Attr("activation", str),  # relu2 | swiglu
        Attr("exact", bool),
    ),
    result="TF",
    reference=reference,
    in_torch=in_torch,
    lanes="FJI",
)
