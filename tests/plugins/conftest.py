"""Conditions under which an op must give the same bits."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, 2, 3, 4], ids="threads={}".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
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
