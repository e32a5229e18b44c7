"""Conditions under which an op must give the same bits, and kernels without an engine."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.redzones import red_zones
from torch.overrides import TorchFunctionMode

from hemiola.plugins.cpu import jit
from hemiola.plugins.cpu import kernel as cpu
from hemiola.plugins.gpu.launch import Kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from kit.interpreter import quicken, round_products_once

    quicken()
    round_products_once()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], cpu.Kernel]:
    """Makes kernels that are compiled into a cache of their own, and are not among the engine's."""
    monkeypatch.setattr(jit, "KERNELS", [])
    monkeypatch.setattr(jit, "_CACHE_DIR", tmp_path)
    return cpu.Kernel


WILD = 681_143_421  # times a size it is no small number, either: eight times 2 to the 29 are 0


class _WildInts(TorchFunctionMode):
    """torch fills with the largest int, to which nothing can be added: loops from there on are empty."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        wild = func in (torch.empty, torch.Tensor.new_empty) and made.dtype in (torch.int32, torch.int64)
        return made.fill_(WILD) if wild else made


@pytest.fixture
def poisoned_empty() -> Iterator[None]:
    """torch.empty and its like are full of NaN, or of ints that are nowhere's index: what an op forgets to
    write shows."""
    torch.use_deterministic_algorithms(True)  # fill_uninitialized_memory is on by default
    with _WildInts():
        assert torch.empty(1).isnan().all()
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def between_red_zones() -> Iterator[None]:
    """Compiled kernels write to their arguments and to scratch alone."""
    with red_zones():
        yield


@pytest.fixture(autouse=True)
def kernels_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled at their first call where there is a GPU, interpreted where Triton was told to."""
    monkeypatch.setattr(Kernel, "compile", None)
    if INTERPRETED:
        from kit.memcheck import memory_checked
        from kit.triton_launcher import launched_by_triton

        with launched_by_triton(), memory_checked():
            yield
        return
    if torch.cuda.is_available():
        from hemiola.plugins.gpu.compile import on_demand

        on_demand()
    yield


@pytest.fixture(params=["forwards", "backwards"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which a kernel's programs run, interpreted: a GPU has none, so nobody may count on one."""
    from triton.runtime.interpreter import interpreter_builder as builder

    forwards = builder.set_grid_idx

    def backwards(*place: int) -> None:
        forwards(*(size - 1 - at for size, at in zip(builder.grid_dim, place, strict=True)))

    if request.param == "backwards":
        monkeypatch.setattr(builder, "set_grid_idx", backwards)
