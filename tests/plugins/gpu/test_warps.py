"""Groups of warps that share nothing: what compute-sanitizer says of them, it says of Triton
(scripts/gpu_sanitize.py)."""

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SM_90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@gluon.jit
def _own(to, first, WHICH: gl.constexpr):
    at = (gl.program_id(0) * 2 + WHICH) * 128 + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(to + at, first + at)


@gluon.jit
def _apart(to, first):
    # Grid: programs of 256 numbers.
    gl.warp_specialize([(_own, (to, first, 0)), (_own, (to, first, 1))], [4], [120])


@pytest.mark.skipif(not SM_90, reason="needs a GPU of sm_90")
def test_groups_of_warps_write_their_own() -> None:
    to = torch.empty(132 * 256, dtype=torch.int32, device="cuda")
    for first in range(100):
        _apart[(132,)](to, first, num_warps=4)
        assert torch.equal(to, torch.arange(first, first + len(to), device="cuda", dtype=torch.int32))
