"""The router of a mixture of experts, one token at a time."""

import torch


def route(
    scores: torch.Tensor,  # [T, E] as projected
    bias: torch.Tensor,  # [E] that decides who is chosen, never the weight; or zero-length: none
    scoring: str,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # [T, K] fp32 and [T, K] int32
    """Weights and experts, best first, the lower id where scores tie; in fp32 (float64 for float64).

    "softmax" over all experts (modeling_qwen3_next.py), or "sigmoid" with a bias and groups, of which those
    with the two highest scores stay (modeling_nemotron_h.py, after DeepSeek-V3, arXiv 2412.19437).
    """
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.zeros(scores.shape[0], top_k, dtype=wide)
    ids = torch.zeros(scores.shape[0], top_k, dtype=torch.int32)
    for t in range(scores.shape[0]):
        raw = scores[t].to(wide)
        if scoring == "softmax":
            raised = torch.exp(raw - raw.max())
            score = raised / raised.sum()
        elif scoring == "sigmoid":
            score = torch.sigmoid(raw)
        else:
            raise ValueError(f"route: scoring is {scoring!r}, expected softmax or sigmoid")
        choice = score + bias.to(wide) if bias.numel() else score.clone()
        if top_groups < num_groups:
            groups = choice.view(num_groups, -1)
            two_best = groups.sort(1, descending=True).values[:, :2].sum(1)
            shut = two_best.sort(descending=True, stable=True).indices[top_groups:]
            groups[shut] = -torch.inf
        chosen = choice.sort(descending=True, stable=True).indices[:top_k]
        weight = score[chosen]
        if renormalise:
            weight = weight / (weight.sum() + 1e-20)
        weights[t], ids[t] = weight * scale, chosen.int()
    return weights.to(torch.promote_types(scores.dtype, torch.float32)), ids
