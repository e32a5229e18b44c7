"""A router's choice of experts, on CUDA."""

import torch

from hemiola.plugins.gpu.checks import absent, check
from hemiola.plugins.gpu.dtypes import FLOATS
from hemiola.plugins.gpu.launch import Kernel, pow2

_route = Kernel("route", "_route")


def route(
    scores: torch.Tensor,  # [T, E] raw
    bias: torch.Tensor,  # [E], or zero-length: none
    scoring: str,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # weights [T, K] fp32, ids [T, K] int32
    """See reference.py. A score that is not a number is chosen last, and its weight says so."""
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"route: scoring is {scoring!r}, expected softmax or sigmoid")
    check("route", "scores", scores, (None, None), FLOATS, scores.device, apart=1, anywhere=True)
    num_tokens, num_experts = scores.shape
    is_biased = not absent(bias)
    if is_biased:
        check("route", "bias", bias, (num_experts,), FLOATS, scores.device, anywhere=True)
    if num_groups < 1 or num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(f"route: {top_groups} of {num_groups} groups of {num_experts} experts")
    if not 1 <= top_k <= num_experts // num_groups * top_groups:
        raise ValueError(f"route: {top_k} of the experts in {top_groups} of {num_groups} groups")
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=scores.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=scores.device)
    if num_tokens:
        _route[(num_tokens,)](
            scores, bias if is_biased else scores, weights, ids, scores.stride(0), float(scale),
            EXPERTS=num_experts, LANES=pow2(num_experts), TOP_K=top_k,
            SLOTS=pow2(top_k), SOFTMAX=scoring == "softmax", BIASED=is_biased,
            NUM_GROUPS=num_groups, TOP_GROUPS=top_groups, RENORMALISE=renormalise, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return weights, ids
