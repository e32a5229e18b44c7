"""What launchers check before a kernel reads an address."""

from collections.abc import Sequence

import torch


def pow2(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def check(
    op: str,
    name: str,
    value: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype | Sequence[torch.dtype],
    rows: bool = False,  # its rows may lie apart, as columns of a wider matrix do
) -> None:
    """Refuse a tensor of another shape, dtype or layout than the kernel reads."""
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if tuple(value.shape) != tuple(shape) or value.dtype not in dtypes:
        raise ValueError(
            f"{op}: {name} is {value.dtype} {list(value.shape)}, expected {dtypes} {list(shape)}"
        )
    strides, dense = value.stride(), 1
    for dim in reversed(range(1 if rows else 0, value.dim())):
        if value.shape[dim] > 1 and strides[dim] != dense:
            raise ValueError(f"{op}: {name} has strides {strides} for shape {list(shape)}, expected dense")
        dense *= value.shape[dim]
    if value.is_floating_point() and value.numel() and value.data_ptr() % 16:
        raise ValueError(f"{op}: {name} starts at an address that is not a multiple of 16")
