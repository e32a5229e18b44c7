"""Kernels are compiled as Triton itself would: for the same types and the same facts of an argument."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.tools.tensor_descriptor import TensorDescriptor

from hemiola.plugins.gpu import compile
from hemiola.plugins.gpu.launch import ALIGNMENT, ANY, ONE, Block, Call, kind_of

HALF = torch.zeros(8, 64, dtype=torch.bfloat16)
VALUES = (
    HALF,
    HALF[:, 1:],
    HALF.float(),
    0,
    1,
    5,
    48,
    -3,
    -16,
    2**31,
    2**31 + 1,
    0.5,
)


@pytest.mark.parametrize("value", [*VALUES, Block(HALF, (4, 16))], ids=str)
def test_an_argument_is_told_what_triton_would_tell(value: Any) -> None:
    theirs = TensorDescriptor.from_tensor(HALF, [4, 16]) if isinstance(value, Block) else value
    kind, told = native_specialize_impl(BaseBackend, theirs, False, True, True)
    ours = kind_of(value)
    assert compile._signature(ours) == kind
    assert (told == "D") == ours.endswith(f":{ALIGNMENT}") and (kind == "constexpr") == (ours == ONE)


@pytest.mark.parametrize("value", [HALF.int(), HALF.long()[1:]], ids=["int32", "int64"])
def test_of_integers_a_kernel_is_told_no_address(value: torch.Tensor) -> None:
    kind, _ = native_specialize_impl(BaseBackend, value, False, True, True)
    assert kind_of(value) == f"{kind}{ANY}" and compile._signature(kind_of(value)) == kind


def test_more_shared_memory_than_a_gpu_has_is_refused_with_both_numbers() -> None:
    from hemiola.plugins.gpu.cover import calls_at
    from hemiola.plugins.gpu.device import Gpu
    from hemiola.plugins.gpu.tiles import Tile
    from hemiola.plugins.linear.cuda import linear

    x, weight, bias = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((5, 64), (64, 64), (0,)))
    large = Tile(256, 128, 64, 8, 4, False)
    (call,) = calls_at(linear, Gpu(86, 84), x, weight, bias, tile=large)
    assert isinstance(call, Call)
    with pytest.raises(
        compile.TooLarge, match=r"linear\._tiles needs \d+ bytes of shared memory, sm_86 has 101376"
    ):
        compile.compile_call(call, 86)
