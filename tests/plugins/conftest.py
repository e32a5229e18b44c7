"""Conditions under which an op must give the same bits, and kernels without an engine."""

import os
from collections.abc import Iterator

import pytest
import torch

from hemiola.plugins.cpu import team
from hemiola.plugins.gpu.launch import Kernel


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A team has as many threads as are asked for, also where the process may run on one core only."""
    monkeypatch.setattr(team, "_TEAM", None)
    monkeypatch.setattr(team, "quota", lambda: team.MOST_THREADS)
    yield
    if team._TEAM is not None:
        team._TEAM.end()


@pytest.fixture(params=[1, 2, 3, 4], ids="threads={}".format)
def threads(request: pytest.FixtureRequest, many_cores: None) -> Iterator[int]:
    """Runs the test with this many threads in torch's loops and GEMMs."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


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
    if os.environ.get("TRITON_INTERPRET") == "1":
        from hemiola.plugins.gpu.jit import launched_by_triton

        with launched_by_triton():
            yield
        return
    if torch.cuda.is_available():
        from hemiola.plugins.gpu.compile import on_demand

        on_demand()
    yield
