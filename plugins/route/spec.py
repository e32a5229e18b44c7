"""The router of a mixture of experts: who computes a token, and how much each counts."""

import torch

from hemiola.plugins.route.reference import route as reference
from hemiola.plugins.spec import (
    FP32,
    Arg,
    Attr,
    Call,
    Form,
    Op,
    Result,
    first_reason,
    fp32_in_sixteens,
    one_dtype,
)


def _refuses(call: Call) -> str:
    if call.attrs["scoring"] not in ("softmax", "sigmoid"):
        return f"scoring is {call.attrs['scoring']!r}, not softmax or sigmoid"
    num_experts, num_groups = call.sizes["E"], call.attrs["num_groups"]
    if num_groups <= 0 or num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < 2):
        return f"{num_experts} experts do not make {num_groups} groups"
    if not 0 < call.attrs["top_groups"] <= num_groups:
        return f"{call.attrs['top_groups']} groups of {num_groups} cannot stay"
    if call.attrs["top_k"] > num_experts // num_groups * call.attrs["top_groups"]:
        return f"top_k {call.attrs['top_k']} is more than the groups leave"
    return ""


ROUTE = Op(
    name="route",
    args=(Arg("scores", "TE"), Arg("bias", "E*", FP32)),
    attrs=(
        Attr("scoring", str),  # softmax | sigmoid
        Attr("top_k", int, "K"),
        Attr("num_groups", int),
        Attr("top_groups", int),
        Attr("renormalise", bool),
        Attr("scale", float),
    ),
    results=(Result("TK", torch.float32), Result("TK", torch.int32)),
    reference=reference,
    forms=(
        Form("compiled", "cpu", first_reason(_refuses, fp32_in_sixteens(""))),
        Form("cuda", "cuda", first_reason(_refuses, one_dtype(wide=["bias"]))),
    ),
    by_line=True,
)
