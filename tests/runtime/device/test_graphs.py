"""Graphs without a GPU: what is captured and when, what is refused, and what lies on a stage.

That replays compute what steps do is asked on a GPU (tests/gpu/test_graphs.py).
"""

import gc
import threading

import numpy as np
import pytest
import torch
from kit.gpu_double import fake_cuda

from hemiola.runtime.device import graphs
from hemiola.runtime.device.graphs import Graphs, Stage
from hemiola.runtime.device.memory import give_back
from hemiola.runtime.errors import Refused

CPU = torch.device("cpu")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU would be told."""
    told: list[str] = []

    class FakeGraph:
        def capture_begin(self, **options: object) -> None:
            assert options == {"pool": "pool", "capture_error_mode": "thread_local"}
            told.append("begin")

        def capture_end(self) -> None:
            told.append("end")

        def replay(self) -> None:
            told.append("replay")

    fake = fake_cuda(
        CUDAGraph=FakeGraph,
        synchronize=lambda device: told.append("wait"),
        empty_cache=lambda: told.append("free"),
        mem_get_info=lambda device: (5, 80),
    )
    monkeypatch.setattr(graphs.torch, "cuda", fake)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: told.append("free host"), raising=False)
    return told


def test_kernels_are_run_before_anything_is_captured(log: list[str]) -> None:
    def step(bucket: str) -> str:
        log.append(bucket)
        return bucket * 2

    made = Graphs(step, ["a", "b", "c"], ["c", "a"], CPU)
    assert log == ["c", "a", "wait", "free", *(x for b in "abc" for x in ("begin", b, "end"))]
    log.clear()
    assert made.replay("b") == "bb" and log == ["replay"]


def test_a_count_begins_before_the_first_step_is_run(log: list[str]) -> None:
    """Which may load kernels."""
    Graphs(log.append, ["a", "b"], ["b"], CPU, report=lambda done, total: log.append(f"{done} of {total}"))
    assert [line for line in log if " of " in line or line in "ab"] == [
        "0 of 2", "b", "a", "1 of 2", "b", "2 of 2",
    ]  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_of_an_engine_that_is_gone_are_not_freed_while_one_is_captured(
    log: list[str], fails: bool
) -> None:
    """CUDA refuses that, and with it the capture: now and then a second engine could not be opened."""

    class Gone:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            log.append("freed")

    def step(bucket: str) -> None:
        Gone()
        log.append(bucket)
        if fails and bucket == "b":
            raise RuntimeError("no")

    often = gc.get_threshold()
    gc.set_threshold(1)
    Gone()
    try:
        Graphs(step, ["a", "b"], ["a"], CPU)
    except Refused:
        assert fails
    finally:
        gc.set_threshold(*often)
    assert gc.isenabled() and "freed" in log[: log.index("begin")]
    assert "freed" not in log[log.index("begin") : len(log) - log[::-1].index("end")]


def test_an_engine_that_is_closed_lets_another_one_capture(log: list[str]) -> None:
    """CUDA lets nobody wait for a device meanwhile, nor torch give its memory back."""
    old = Graphs(log.append, ["a"], [], CPU)
    closing = [
        threading.Thread(target=old.close),
        threading.Thread(target=give_back, args=(torch.device("cuda", 0),)),
    ]

    def step(bucket: str) -> None:
        if bucket == "a":
            for thread in closing:
                thread.start()
        for thread in closing:
            thread.join(0.1)
        log.append(bucket)

    log.clear()
    Graphs(step, ["a", "b"], [], CPU)
    for thread in closing:
        thread.join(60)
    assert log[:8] == ["wait", "free", "begin", "a", "end", "begin", "b", "end"]
    assert sorted(log[8:]) == ["free", "free host", "wait"]


def test_the_collector_may_close_an_engine_before_a_capture(log: list[str]) -> None:
    class Forgotten:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            closing.start()
            closing.join(10)
            log.append("stuck" if closing.is_alive() else "closed")

    closing = threading.Thread(target=give_back, args=(torch.device("cuda", 0),), daemon=True)
    gc.disable()
    try:
        Forgotten()
        Graphs(log.append, ["a"], [], CPU)
    finally:
        gc.enable()
    assert log == ["free", "free host", "closed", "wait", "free", "begin", "a", "end"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("no"), "no memory for a step of b: .* leave 5 of 80 bytes; lower max_rows"),
        (RuntimeError("it waits\nand more"), r"b cannot be captured .*\(it waits\); .*cuda_graphs=False"),
    ],
    ids=["memory", "a wait"],
)
@pytest.mark.parametrize("warm", [[], ["b"]], ids=["captured", "run before"])
def test_a_step_that_has_no_graph_is_refused(
    log: list[str], error: Exception, message: str, warm: list[str]
) -> None:
    def step(bucket: str) -> None:
        if bucket == "b":
            raise error

    with pytest.raises(Refused, match=message):
        Graphs(step, ["a", "b"], warm, CPU)
    assert log.count("begin") == log.count("end") == (0 if warm else 2)


def test_a_stage_holds_what_was_sent_last_at_the_same_place() -> None:
    shapes = [((2, 3), np.int32), ((0,), np.int64), ((5,), np.int64), ((4, 2), np.int32)]
    stage = Stage([shapes, [((1,), np.int64)]], CPU)
    views = stage.views(shapes)
    for start in (0, 100):
        arrays = [np.arange(start, start + np.prod(shape), dtype=d).reshape(shape) for shape, d in shapes]
        stage.send([*arrays[:3], arrays[3][:2]])  # of the last, less than there is room for
        for view, array in zip(views[:3], arrays, strict=False):
            assert np.array_equal(view.numpy(), array) and view.dtype == torch.from_numpy(array).dtype
        assert np.array_equal(views[3][:2].numpy(), arrays[3][:2])
