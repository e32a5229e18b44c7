"""What tests of CUDA kernels share: where they run, poisoned outputs, references, the law of rows.

Without a GPU the same tests run on tiny sizes under Triton's interpreter, if TRITON_INTERPRET=1.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bfloat16

if DEVICE == "cpu" and not INTERPRETED:  # a module at once: a thousand tests, each skipped, take seconds
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
on_gpu = pytest.mark.gpu
needs_memory = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU's memory")

# tokens that run beside a row: 1, less than a tile, a tile and one more, many
MANY = 2200 if DEVICE == "cuda" else 20
LENGTHS = (1, 2, 7, 16, 17, 64, 300, 2048) if DEVICE == "cuda" else (1, 2, 7, 17)


def randn(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    """Fresh random numbers on the device."""
    return torch.randn(*shape, device=DEVICE).to(dtype)


def apart(x: torch.Tensor, gap: int = 8) -> torch.Tensor:
    """The same numbers, with `gap` of NaN between lines."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), float("nan"), dtype=x.dtype, device=x.device)
    view = wide[..., : x.shape[-1]]
    return view.copy_(x)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a, b)


@contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty and its like are full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def rows_are_alone(
    run: Callable[..., torch.Tensor], *inputs: torch.Tensor, lengths: tuple[int, ...] = LENGTHS
) -> None:
    """run(*inputs) gives a row the same bits at every place of every length; inputs have a line per row."""
    whole = run(*inputs)
    for length in lengths:
        for first in {0, 1, len(whole) // 2, len(whole) - length}:
            part = slice(first, first + length)
            if first >= 0 and first + length <= len(whole):
                alone = run(*(x[part] for x in inputs))
                assert same_bits(alone, whole[part]), f"{length} rows from {first}"
