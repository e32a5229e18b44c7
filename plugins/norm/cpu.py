"""RMS norm over groups of channels, all tokens at once.

The same calls serve both numerics: torch reduces the last dimension of a row in an order that depends on its
length only, and every elementwise function used here gives the same bits in its vector loop and in the scalar
loop for the last elements. torch.sigmoid and F.silu do not (nor at the ends of threads' shares): see `silu`.
"""

import itertools

import torch

from hemiola.plugins.bits import IN_CACHE


def norm(
    x: torch.Tensor,  # [T, W]
    gate: torch.Tensor,  # [T, W], or zero-length: none
    weight: torch.Tensor,  # [W]
    eps: float,
    group_len: int,
    gate_first: bool,
) -> torch.Tensor:  # [T, W]
    """See reference.py. A row's bits depend on nothing but the row, for any T and thread count."""
    rows = max(1, IN_CACHE // x.shape[1])
    if x.shape[0] <= rows:
        return _norm(x, gate, weight, eps, group_len, gate_first)
    y = x.new_empty(x.shape)
    gates = gate.split(rows) if gate.numel() else itertools.repeat(gate)
    for out, part, gate in zip(y.split(rows), x.split(rows), gates, strict=False):
        out.copy_(_norm(part, gate, weight, eps, group_len, gate_first))
    return y


def _norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group_len: int, gate_first: bool
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    gated = gate.numel() > 0
    if gated and gate_first:
        y = y * silu(gate.to(wide))
    if group_len != x.shape[1]:
        y = y.unflatten(1, (-1, group_len))
    # the length of a group instead of its mean square: no tensor of squares
    length = torch.linalg.vector_norm(y, 2, -1, True)
    scale = length.mul_(length).add_(group_len * eps).rsqrt_().mul_(group_len**0.5)
    y = (y * scale).view(x.shape).mul_(weight)
    if gated and not gate_first:
        y *= silu(gate.to(wide))
    return y.to(x.dtype)


def silu(z: torch.Tensor) -> torch.Tensor:
    """z * sigmoid(z), the same bits wherever an element stands."""
    one_plus = torch.neg(z).exp_().add_(1)
    return torch.div(z, one_plus, out=one_plus)
