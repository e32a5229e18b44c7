"""What launchers refuse before a kernel reads memory that is not there, and the alignment they count on."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

ALIGNMENT = 16  # bytes of a pointer and elements of a stride: what Triton specialises on


class _Here(threading.local):
    spared = False


_here = _Here()  # of each thread: two engines' steps begin and end as they please


@contextmanager
def spared() -> Iterator[None]:
    """Inside, nothing is checked: the calls of an engine were, when it was built (plugins/gpu/cover.py)."""
    before, _here.spared = _here.spared, True
    try:
        yield
    finally:
        _here.spared = before


def check(
    op: str,
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],  # None: any size
    dtypes: torch.dtype | Sequence[torch.dtype],
    device: torch.device,
    apart: int = 0,  # so many dimensions, the first, may lie apart, as columns of a wider matrix do
    anywhere: bool = False,  # floats need not start at 16 bytes
) -> None:
    """Raises ValueError where a kernel would read what is not there, or at another pace than it may."""
    if _here.spared:
        return
    fits = tensor.dim() == len(shape)
    fits = fits and all(size in (None, have) for size, have in zip(shape, tensor.shape, strict=True))
    if not fits:
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{op}: {name} has the shape {list(tensor.shape)}, expected [{wanted}]")
    if tensor.dtype != dtypes and (isinstance(dtypes, torch.dtype) or tensor.dtype not in dtypes):
        wanted = str(dtypes) if isinstance(dtypes, torch.dtype) else " or ".join(map(str, dtypes))
        raise ValueError(f"{op}: {name} is {tensor.dtype}, expected {wanted}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, expected {device}")
    if not tensor.numel():
        return
    if not (apart == 0 and tensor.is_contiguous()):
        strides, dense = tensor.stride(), 1
        for dim in reversed(range(apart, tensor.dim())):
            if tensor.shape[dim] > 1 and strides[dim] != dense:
                raise ValueError(
                    f"{op}: {name} has the strides {list(strides)} for the shape {list(tensor.shape)},"
                    f" expected neighbours side by side behind the first {apart} dimensions"
                )
            dense *= tensor.shape[dim]
    if not anywhere and tensor.is_floating_point() and tensor.data_ptr() % ALIGNMENT:
        raise ValueError(f"{op}: {name} starts at an address that is not a multiple of {ALIGNMENT}")


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
