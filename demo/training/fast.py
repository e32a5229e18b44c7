"""What makes training quick: batched chunk forms of the recurrences, and the optimizer.

transformers' torch fallbacks are readable references. `fast_training_paths` swaps them for the same formulas
in a form that keeps a GPU busy; `check_fast_paths` compares the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from model import nemotron, qwen, trunk_hidden
from torch import Tensor, nn
from transformers import PreTrainedModel

ADAM_RATE, MUON_RATE = 3e-3, 0.02
TABLE_DECAY, MUON_DECAY = 0.1, 0.3
NOT_MUON = ("conv1d", "gate.weight", "in_proj_a", "in_proj_b")


def unit_lower_inverse(system: Tensor) -> Tensor:
    """(I + system)^-1 for strictly lower triangular system [..., C, C]; differentiable.

    8x8 blocks by their (short, hence tame) Neumann series, then pairs merged: no power of the full matrix is
    formed, since those overflow when neighbouring keys are alike.
    """
    size, full = 8, system.shape[-1]

    def diagonal_blocks(width: int) -> Tensor:
        tiles = system.detach().unflatten(-1, (-1, width)).unflatten(-3, (-1, width))
        return tiles.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    minus = -diagonal_blocks(size)
    squared = minus @ minus
    inverse = torch.eye(size, device=system.device) + minus
    inverse = inverse + squared @ inverse
    inverse = inverse + (squared @ squared) @ inverse
    while size < full:
        corner = diagonal_blocks(2 * size)[..., size:, :size]
        top, bottom = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        lower = torch.cat([-(bottom @ corner @ top), bottom], dim=-1)
        inverse = torch.cat([F.pad(top, (0, size)), lower], dim=-2)
        size *= 2
    inverse = inverse[..., 0, :, :]
    # one Newton step: leaves the value, and carries the gradient -X dA X
    return 2 * inverse - inverse @ (system @ inverse + inverse)


def delta_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """transformers' torch_chunk_gated_delta_rule without its batched triangular solves."""
    dtype, length, heads, chunk = query.dtype, query.shape[1], value.shape[2], 64
    padding = -length % chunk
    with torch.autocast(query.device.type, enabled=False):

        def chunked(x: Tensor) -> Tensor:  # [B, T, H, D] -> [B, H, T / chunk, chunk, D]
            x = x.float().repeat_interleave(heads // x.shape[2], dim=2)
            return F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4)

        query, key, value = chunked(query), chunked(key), chunked(value)
        beta, decay = chunked(beta[..., None]), chunked(g[..., None])[..., 0].cumsum(-1)
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6) * query.shape[-1] ** -0.5
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
        future = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
        between = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, float("-inf")).exp()
        transposed = key.transpose(-1, -2)
        inverse = unit_lower_inverse((((key * beta) @ transposed) * between).tril(-1))
        since_start = decay.exp()[..., None]
        new_values = inverse @ (value * beta)
        old_keys = inverse @ (key * beta * since_start)
        scores = (query @ transposed) * between
        query = query * since_start
        until_end = (key * (decay[..., -1:] - decay).exp()[..., None]).transpose(-1, -2)
        whole = decay[..., -1].exp()[..., None, None]
        state = (
            torch.zeros_like(until_end[:, :, 0] @ value[:, :, 0]) if initial_state is None else initial_state
        )
        outputs = []
        for i in range(value.shape[2]):
            fresh = new_values[:, :, i] - old_keys[:, :, i] @ state
            outputs.append(query[:, :, i] @ state + scores[:, :, i] @ fresh)
            state = state * whole[:, :, i] + until_end[:, :, i] @ fresh
        out = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length].transpose(1, 2)
    return out.to(dtype), state if output_final_state else None


def mamba2_chunks(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """transformers' mamba2_chunk_scan with B and C per group and no five-dimensional products."""
    length, heads, groups = hidden_states.shape[1], hidden_states.shape[2], B.shape[2]
    padding = -length % chunk_size
    with torch.autocast(hidden_states.device.type, enabled=False):

        def chunked(x: Tensor) -> Tensor:  # [B, T, H, D] -> [B, T / chunk, H, chunk, D]
            x = F.pad(x.float(), (0, 0, 0, 0, 0, padding))
            return x.unflatten(1, (-1, chunk_size)).transpose(2, 3)

        step = F.softplus(dt.float() + dt_bias)[..., None]
        decay = chunked(step * A[:, None])[..., 0].cumsum(-1)  # [B, c, H, l]
        x = chunked(hidden_states.float() * step)
        B, C = chunked(B), chunked(C)
        future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=dt.device).triu(1)
        between = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, float("-inf")).exp()
        scores = (C @ B.transpose(-1, -2)).repeat_interleave(heads // groups, dim=2) * between
        B, C = (m.repeat_interleave(heads // groups, dim=2) for m in (B, C))
        until_end = (decay[..., -1:] - decay).exp()[..., None]
        added = x.transpose(-1, -2) @ (B * until_end)  # [B, c, H, P, N]
        whole = decay[..., -1].exp()[..., None, None]
        state = torch.zeros_like(added[:, 0]) if initial_states is None else initial_states
        states = []
        for i in range(added.shape[1]):
            states.append(state)
            state = state * whole[:, i] + added[:, i]
        before = torch.stack(states, dim=1)
        y = scores @ x + (C * decay.exp()[..., None]) @ before.transpose(-1, -2)
        y = y.transpose(2, 3).flatten(1, 2)[:, :length] + D[:, None] * hidden_states.float()
    return (y, state) if return_final_states else y


def causal_conv(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """Depthwise convolution, then silu, as four shifted products: cuDNN's depthwise backward is slow."""
    length, taps = hidden_states.shape[-1], weight.shape[-1]
    padded = F.pad(hidden_states, (taps - 1, 0))
    out = sum(padded[..., i : i + length] * weight[:, i, None] for i in range(taps))
    if bias is not None:
        out = out + bias[:, None]
    return F.silu(out).to(hidden_states.dtype)


def dense_experts(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """All experts for all tokens, unchosen ones weighted 0: eight small experts are one wide MLP."""
    weights = top_k_weights.new_zeros(hidden_states.shape[0], self.num_experts).scatter(
        1, top_k_index, top_k_weights
    )
    if self.training:
        self.load += (weights.detach() > 0).sum(0)
    inner = F.linear(hidden_states, self.up_proj.flatten(0, 1)).unflatten(-1, (self.num_experts, -1))
    inner = F.relu(inner).square() * weights[..., None]
    return F.linear(inner.to(hidden_states.dtype).flatten(1), self.down_proj.transpose(0, 1).flatten(1))


@contextlib.contextmanager
def fast_training_paths() -> Iterator[None]:
    swaps = [
        (qwen, "torch_chunk_gated_delta_rule", delta_chunks),
        (qwen, "causal_conv1d_fn", causal_conv),
        (nemotron, "mamba2_chunk_scan", mamba2_chunks),
        (nemotron, "causal_conv1d_fn", causal_conv),
        (nemotron, "mamba2_split_conv1d_scan_combined", lambda *_args, **_kwargs: None),
        (nemotron.NemotronHExperts, "forward", dense_experts),
    ]
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in swaps]
    for owner, name, function in swaps:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in saved:
            setattr(owner, name, function)


def check_fast_paths(model: PreTrainedModel, token_ids: Tensor) -> float:
    """Largest logit difference between transformers' own forward and ours, fp32, no gradient."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        theirs = model(token_ids, use_cache=False).logits
        with fast_training_paths():
            ours = model.lm_head(trunk_hidden(model, token_ids))
    model.train(was_training)
    return (theirs - ours).abs().max().item()


def orthogonalised(update: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest matrix with unit singular values (Muon), batched."""
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Optimizer:
    """Muon for the hidden matrices, AdamW for embeddings (with decay), convolutions, routers and vectors."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        tables: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, weight in named:
            if "embed" in name or "lm_head" in name:
                tables.append(weight)
            elif weight.ndim < 2 or any(part in name for part in NOT_MUON):
                rest.append(weight)
            else:
                by_shape.setdefault(tuple(weight.shape), []).append(weight)
        self.groups = list(by_shape.values())
        self.momentum = [torch.zeros_like(torch.stack(list(g))) for g in self.groups]
        groups = [{"params": tables, "weight_decay": TABLE_DECAY}, {"params": rest, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=rest[0].is_cuda)
        self.weights = tables + rest + [w for group in self.groups for w in group]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * factor
        self.adam.step()
        rate = MUON_RATE * factor
        for group, momentum in zip(self.groups, self.momentum, strict=True):
            gradient = torch.stack([w.grad for w in group])
            momentum.lerp_(gradient, 0.05)
            update = orthogonalised(gradient.lerp(momentum, 0.95)).float()
            update *= max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            torch._foreach_mul_(group, 1.0 - rate * MUON_DECAY)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate)
        for weight in self.weights:
            weight.grad = None
