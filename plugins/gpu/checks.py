"""What launchers refuse before a kernel reads memory that is not there, and the alignment they count on."""

from collections.abc import Sequence

import torch

ALIGNMENT = 16  # bytes of a pointer and elements of a stride: what Triton specialises on


def check(
    op: str,
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Raises ValueError unless the tensor has this shape (None: any size), such a dtype, and whole lines."""
    fits = tensor.dim() == len(shape)
    fits = fits and all(size in (None, have) for size, have in zip(shape, tensor.shape, strict=True))
    if not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{op}: {name} has the shape {list(tensor.shape)}, expected [{wanted}]")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{op}: {name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, expected {device}")
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{op}: {name} has the stride {tensor.stride(-1)} between neighbours, expected 1")


def is_aligned(x: torch.Tensor) -> bool:
    """Whether Triton sees the same alignment in every such tensor."""
    return x.data_ptr() % ALIGNMENT == 0 and all(stride % ALIGNMENT == 0 for stride in x.stride()[:-1])


def is_described(x: torch.Tensor) -> bool:
    """Whether a tensor descriptor can describe x: lines start at 16 bytes."""
    lines = all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
    return x.data_ptr() % 16 == 0 and lines


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x [T, W], or a copy of it whose lines start aligned.

    A kernel compiled for another alignment may add up a line in another order.
    """
    if is_aligned(x):
        return x
    num_tokens, width = x.shape
    return x.new_empty(num_tokens, -(-width // ALIGNMENT) * ALIGNMENT)[:, :width].copy_(x)


def absent(tensor: torch.Tensor) -> bool:
    """An argument that is not there is a tensor of no length."""
    return tensor.dim() == 1 and tensor.shape[0] == 0
