"""The sum over all ranks, on GPUs: the same bits by either way."""

from collections.abc import Iterator

import torch

from hemiola.plugins.gpu.launch import Kernel, cdiv
from hemiola.plugins.gpu.sizes import Size, Variant, around
from hemiola.plugins.gpu.windows import FEW, PAYLOAD, blocks_of, pieces_of
from hemiola.plugins.ranks import PROGRAMS, size_of

ONCE_BYTES = 2**16  # of a message; a longer one takes longer on its way than a second passage does
WHOLE_BYTES = 2**22  # of a message; a longer one takes longer on its way than one number behind another
_sum = Kernel("sum", "_sum")


def variants(
    largest: Size, x: torch.Tensor, group: torch.Tensor, *residual: torch.Tensor
) -> Iterator[Variant]:
    """Both ways, in pieces of both lengths."""
    line_bytes, size = x.shape[1] * x.itemsize, size_of(group)
    few = PAYLOAD * FEW * PROGRAMS
    for tokens in around(
        [n / line_bytes for n in (ONCE_BYTES, few, few * size, WHOLE_BYTES)], largest.tokens
    ):
        yield Variant(Size(tokens, 1, 1))


def sum(
    x: torch.Tensor,
    group: torch.Tensor,
    residual: torch.Tensor | None = None,
    twice: bool | None = None,
    whole: bool | None = None,
) -> torch.Tensor:
    """See reference.py. twice: each rank adds up its part of the lines for all; by default where there are
    more than two ranks, and the message is long. whole: in blocks; by default a message that is longer."""
    x, size = x.contiguous(), size_of(group)
    y = torch.empty_like(x)
    if twice is None:
        twice = size > 2 and x.nbytes > ONCE_BYTES
    if whole is None:
        whole = x.nbytes > WHOLE_BYTES
    num_lines = x.nbytes // PAYLOAD
    cut = blocks_of if whole else pieces_of
    pieces = cut(cdiv(num_lines, size) if twice else num_lines)
    lines, made = x.view(torch.int64), y.view(torch.int64)
    more = lines if residual is None else residual.contiguous().view(torch.int64)
    _sum[(pieces.programs,)](
        lines, group, more, made, num_lines,
        RANKS=size, WIDE=x.dtype is torch.float32, MORE=residual is not None, BLOCK=pieces.lines, TWICE=twice,
        WHOLE=whole, num_warps=pieces.warps,
    )  # fmt: skip
    return y
