"""The dense layer in GEMM calls that give a row the same bits whatever stands beside it.

A BLAS adds up one output in a single chain of fused multiply-adds, in the order of the products, as long as
the sum is short enough for one pass of its kernel. Longer sums it cuts at places that depend on the number of
rows and threads, and for few rows or columns it uses kernels that add in another order. So here a GEMM call
sums at most SUM_LEN products, and has at least MIN_ROWS rows and MIN_COLUMNS columns; the parts of a longer
sum are added in order. tests/plugins/linear checks this (fp32) on the machine it runs on.
"""

import torch
import torch.nn.functional as F

SUM_LEN = 256
MIN_ROWS = 32
MIN_COLUMNS = 16


def linear(
    x: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [O, F]
    bias: torch.Tensor,  # [O], or zero-length: none
) -> torch.Tensor:  # [T, O]
    """See reference.py. A row's bits (fp32) do not depend on T, its place, other rows or the thread count."""
    wide = torch.promote_types(x.dtype, torch.float32)
    num_tokens = x.shape[0]
    x_wide = x.to(wide)
    if num_tokens % MIN_ROWS:
        x_wide = F.pad(x_wide, (0, 0, 0, -num_tokens % MIN_ROWS))
    y = dense(x_wide, weight.to(wide))
    if bias.numel():
        y += bias
    return y[:num_tokens].to(x.dtype).contiguous()


def dense(
    x: torch.Tensor,  # [T, F], T a multiple of MIN_ROWS
    weight: torch.Tensor,  # [O, F]
) -> torch.Tensor:  # [T, O]
    """x times weight transposed, every output summed in parts of SUM_LEN products, in order."""
    num_outputs = weight.shape[0]
    if num_outputs < MIN_COLUMNS:
        weight = F.pad(weight, (0, 0, 0, MIN_COLUMNS - num_outputs))
    columns = weight.t()
    y = torch.mm(x[:, :SUM_LEN], columns[:SUM_LEN])
    for start in range(SUM_LEN, x.shape[1], SUM_LEN):
        y.addmm_(x[:, start : start + SUM_LEN], columns[start : start + SUM_LEN])
    return y[:, :num_outputs]
