"""A closed engine, or one that did not open, holds nothing: the next one in the process finds its memory.

Python's collector is off meanwhile: what only it would find is found too late, or never behind gc.freeze().
On a GPU: tests/gpu/test_closing.py.
"""

import gc
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kit.gpu_double import gpu_double
from torch.fx import Node

from hemiola.runtime import open as opening
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.device.graphs import Graphs
from hemiola.runtime.errors import Failed, Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.step.captured import Captured

Get = Callable[..., Path]
DRAFTS = pytest.mark.parametrize("drafts", ["none", "ngram", "mtp"])
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def tensors() -> list[torch.Tensor]:
    """All that have memory, or would on a GPU: not what a program notes of shapes."""
    everything = gc.get_objects()
    noted = {id(thing.meta.get("val")) for thing in everything if type(thing) is Node}
    return [thing for thing in everything if type(thing) is torch.Tensor and id(thing) not in noted]


class Watch:
    """Tensors since it was made."""

    def __init__(self) -> None:
        gc.collect()
        self._known = {id(tensor): weakref.ref(tensor) for tensor in tensors()}

    def new(self) -> list[weakref.ref]:
        known = self._known
        return [weakref.ref(t) for t in tensors() if id(t) not in known or known[id(t)]() is not t]


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    gc.disable()
    yield made
    gc.enable()


def shapes(alive: list[weakref.ref]) -> list[tuple[int, ...]]:
    return [tuple(found.shape) for ref in alive if (found := ref()) is not None]


@pytest.fixture(scope="module", params=["qwen3_5", "nemotron_h_moe"])
def engine_dir(request: pytest.FixtureRequest, tiny_engine: Get) -> Path:
    """What a process keeps for all engines it has once one was open."""
    made = tiny_engine(request.param)
    for drafts in ("none", "ngram", "mtp"):
        with LLM(made, drafts=drafts) as llm:
            llm.generate([[5, 6, 7] * 9], PARAMS)
    return made


@DRAFTS
def test_a_closed_engine_keeps_no_tensor(engine_dir: Path, watch: Watch, drafts: str) -> None:
    """Weights, pages, slots and all that a step takes, whoever still holds the LLM."""
    llm = LLM(engine_dir, drafts=drafts)
    llm.generate([[5, 6, 7] * 9, [8, 9]], PARAMS)
    held = watch.new()
    assert len(held) > 50
    llm.close()
    assert shapes(held) == shapes(watch.new()) == []
    assert llm.counters.num_output_tokens == 24 and llm.load().num_free_slots > 0 and llm.reuse is not None


def test_a_forgotten_engine_keeps_no_tensor(engine_dir: Path, watch: Watch) -> None:
    llm = LLM(engine_dir)
    llm.generate([[5, 6, 7] * 9], PARAMS)
    del llm
    assert shapes(watch.new()) == []


def test_a_failed_engine_keeps_no_tensor(
    engine_dir: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(engine_dir, drafts="ngram")
    with monkeypatch.context() as patch:
        patch.setattr(type(llm._loop.outbox), "drain", lambda outbox, plan: 1 // 0)
        (output,) = llm.generate([[5, 6, 7] * 9], PARAMS)
    assert output.finish_reason == "error" and "ZeroDivisionError" in str(output.error)
    llm.close()
    caplog.clear()  # the error, and with it the frames of the step
    assert shapes(watch.new()) == []
    with pytest.raises(Failed):
        llm.generate([[5]], PARAMS)


def test_an_engine_that_does_not_open_keeps_no_tensor(
    engine_dir: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the error is at hand, and with it the frames of who raised it."""
    made = []

    def fails(*given: object) -> None:
        made.extend(watch.new())
        raise Refused("other", message="no")

    monkeypatch.setattr(opening, "Outbox", fails)
    with pytest.raises(Refused) as error:
        LLM(engine_dir)
    assert len(made) > 50 and shapes(made) == shapes(watch.new()) == []
    assert isinstance(error.value.__traceback__, types.TracebackType)


def test_what_fails_behind_an_error_of_opening_does_not_take_its_place(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: object) -> None:
        raise Refused("other", message="lower max_rows")

    monkeypatch.setattr(opening, "Outbox", fails)
    monkeypatch.setattr(opening, "give_back", lambda device: 1 // 0)
    with pytest.raises(Refused, match="lower max_rows"):
        LLM(engine_dir)
    assert "could not give all of its memory back" in caplog.text


def test_errors_of_the_caller_keep_their_frames(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def caller() -> None:
        mine = 5
        raise ValueError(mine)

    monkeypatch.setattr(opening, "Outbox", lambda *given: 1 // 0)
    try:
        caller()
    except ValueError as error:
        with pytest.raises(ZeroDivisionError):
            LLM(engine_dir)
        assert [frame.f_locals.get("mine") for frame, _ in traceback.walk_tb(error.__traceback__)][-1] == 5


def test_a_closed_engine_is_not_entered_again(engine_dir: Path) -> None:
    with LLM(engine_dir) as llm:
        pass
    with pytest.raises(Refused, match=r"^the engine is closed; open it again$"), llm:
        pass
    with pytest.raises(Refused, match="the engine is closed"):
        llm.generate([[5]])
    llm.close()


def test_another_engine_opens_where_one_was_closed(engine_dir: Path) -> None:
    """A thread that works alone has memory of its own, which goes with it."""
    found = []
    for _ in range(3):
        with LLM(engine_dir) as llm:
            found.append(llm.generate([[5, 6, 7] * 9], PARAMS)[0].token_ids)
    assert found[0] == found[1] == found[2]


# An engine for a GPU, on the double: weights, pages, graphs, kernels.


@pytest.fixture(scope="module")
def gpu_engine(tiny_engine: Get) -> Path:
    made = tiny_engine("nemotron_h_moe", arch="sm_90", max_rows=1, max_step_tokens=64)
    with gpu_double():
        LLM(made, drafts="none").close()
    return made


@pytest.mark.parametrize("drafts", ["none", "mtp"])
def test_a_closed_engine_gives_a_gpu_all_back(gpu_engine: Path, watch: Watch, drafts: str) -> None:
    """Graphs before the kernels that they launch; then what torch keeps, for others ask the driver."""
    with gpu_double() as double:
        llm = LLM(gpu_engine, drafts=drafts)
        held = watch.new()
        assert len(held) > 50 and len(double.graphs) > 5 and double.driver.alive
        double.told.clear()
        llm.close()
        assert not double.graphs and not double.driver.alive
        assert shapes(held) == shapes(watch.new()) == []
        assert double.told == ["empty", "host"]


@pytest.mark.parametrize("when", ["kernels", "prompts", "steps", "thread"])
def test_an_engine_that_does_not_open_gives_a_gpu_all_back(
    gpu_engine: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Out of memory in a graph, a damaged binary, no thread."""
    made: list[weakref.ref] = []

    def fails(*given: object, **named: object) -> None:
        made.extend(watch.new())
        raise torch.OutOfMemoryError("no") if when in ("prompts", "steps") else RuntimeError("no thread")

    with gpu_double() as double:
        match when:
            case "kernels":
                load = double.driver.load
                cubins = iter([b"."] * 9)
                monkeypatch.setattr(
                    double.driver, "load", lambda *call: load(call[0], next(cubins, b""), call[2])
                )
            case "prompts":
                monkeypatch.setattr(Graphs, "_capture", fails)
            case "steps":
                monkeypatch.setattr(Captured, "step", fails)
            case "thread":
                monkeypatch.setattr("threading.Thread.start", fails)
        with pytest.raises((Refused, RuntimeError)) as error:
            LLM(gpu_engine, drafts="none")
        assert double.driver.loaded and not double.graphs and not double.driver.alive
        assert shapes(made) == shapes(watch.new()) == []
        assert double.told[-2:] == ["empty", "host"] and set(double.told) == {"empty", "host"}
        assert error.value.__traceback__ is not None


def test_kernels_are_unloaded_when_the_last_step_is_done(gpu_engine: Path) -> None:
    with gpu_double() as double:
        waits: list[int] = []
        llm = LLM(gpu_engine, drafts="none", cuda_graphs=False)
        num = len(double.driver.alive)
        double.cuda.synchronize = lambda device: waits.append(len(double.driver.alive))
        llm.close()
        assert waits == [num] and num and not double.driver.alive


def test_kernels_of_another_engine_stay(gpu_engine: Path) -> None:
    """Two of one process share what both launch."""
    with gpu_double() as double:
        one, other = LLM(gpu_engine, drafts="none"), LLM(gpu_engine, drafts="none")
        num = len(double.driver.loaded)
        assert num == len(set(double.driver.loaded)) == len(double.driver.alive)
        one.close()
        assert len(double.driver.alive) == num
        other.close()
        assert not double.driver.alive
