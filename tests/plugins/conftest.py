"""Conditions under which an op must give the same bits, and kernels without an engine."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hemiola.plugins.cpu import jit
from hemiola.plugins.cpu import kernel as cpu
from hemiola.plugins.gpu.launch import Kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from kit.interpreter import quicken

    quicken()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], cpu.Kernel]:
    """Makes kernels that are compiled into a cache of their own, and are not among the engine's."""
    monkeypatch.setattr(jit, "KERNELS", [])
    monkeypatch.setattr(jit, "_CACHE_DIR", tmp_path)
    return cpu.Kernel


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """torch.empty and its like are full of NaN: what an op forgets to write shows."""
    torch.use_deterministic_algorithms(True)  # fill_uninitialized_memory is on by default
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def kernels_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled at their first call where there is a GPU, interpreted where Triton was told to."""
    monkeypatch.setattr(Kernel, "compile", None)
    if INTERPRETED:
        from hemiola.plugins.gpu.jit import launched_by_triton

        with launched_by_triton():
            yield
        return
    if torch.cuda.is_available():
        from hemiola.plugins.gpu.compile import on_demand

        on_demand()
    yield
