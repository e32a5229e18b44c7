"""Groups of warps that share nothing: what compute-sanitizer says of them, it says of Triton
(scripts/gpu_sanitize.py)."""

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hemiola.plugins.gpu import compile as compiling
from hemiola.plugins.gpu.launch import Kernel

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
def test_groups_of_warps_write_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "source", lambda name: _apart)
    kernel, to = Kernel("control", "_apart"), torch.empty(132 * 256, dtype=torch.int32, device="cuda")
    wanted = torch.arange(7, 7 + len(to), device="cuda", dtype=torch.int32)
    for _ in range(200):
        to.fill_(-1)
        kernel[(132,)](to, 7, num_warps=4)
        assert torch.equal(to, wanted)
