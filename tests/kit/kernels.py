"""Engines for GPUs whose kernels nobody compiles: what tests look at is all else."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hemiola.plugins.gpu.binaries import Binary
from hemiola.plugins.gpu.launch import Call


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, a kernel is compiled into its name. Triton still says what an int or an address is told."""
    compile = pytest.importorskip("hemiola.plugins.gpu.compile", reason="needs Triton")

    def named(call: Call, capability: int) -> object:
        return compile.Compiled(Binary(call, call.kernel, 0, 128, ()), f"{call} {capability}".encode(), "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "compile_call", named)
        yield
