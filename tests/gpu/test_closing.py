"""A closed engine gives a GPU's memory back, while its LLM lives and Python's collector is off."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from kit.gpu_engines import FAMILIES, MARKS, NO_REHEARSAL

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.device.graphs import Graphs
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM

pytestmark = [*MARKS, NO_REHEARSAL]
PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SIZES = {"cache_bytes": 2**30}
SMALL = 2**22  # bytes: what torch asks the driver for at a time


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held() -> tuple[int, int]:
    """Bytes of tensors, and those that torch has of the driver."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", FAMILIES)
def test_closing_gives_all_memory_back(engine: Callable, family: str, graphs: bool) -> None:
    """The first one leaves what a process keeps for all, some numbers."""
    options = {"cuda_graphs": graphs, "drafts": "mtp"} | SIZES
    with LLM(engine(family), **options) as llm:
        wanted = llm.generate([[5, 6, 7] * 20], PARAMS)[0].token_ids
    before = held()
    for _ in range(2):
        llm = LLM(engine(family), **options)
        assert llm.generate([[5, 6, 7] * 20], PARAMS)[0].token_ids == wanted
        assert held()[0] > before[0] + SMALL and held()[1] > before[1] + SMALL
        llm.close()
        assert held()[0] == before[0] and held()[1] <= before[1] + SMALL


def test_an_engine_that_finds_no_memory_gives_back_what_it_took(
    engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(engine(FAMILIES[1]), **SIZES):
        pass
    before = held()

    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Graphs, "_capture", full)
        with pytest.raises(Refused, match="no memory for a step") as error:
            LLM(engine(FAMILIES[1]), **SIZES)
    assert held()[0] == before[0] and held()[1] <= before[1] + SMALL and error.value.__traceback__ is not None
    with LLM(engine(FAMILIES[1]), **SIZES) as llm:
        assert len(llm.generate([[5, 6, 7]], PARAMS)[0].token_ids) == 20
