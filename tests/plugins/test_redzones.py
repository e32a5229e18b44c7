"""What lies outside of a kernel's memory is seen: the guard that all tests of compiled kernels run under."""

import pytest
import torch
from kit.redzones import MARK, red_zones

from hemiola.plugins.cpu import kernel
from hemiola.plugins.cpu.code import EAGER, Recorder
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import get, get_int, put, put_int
from hemiola.plugins.cpu.steps import RecordedStep
from hemiola.plugins.sizes import FreeSize

NUM = 10
OUTSIDE = pytest.mark.parametrize("place", [-256, -1, NUM, NUM + 255])


@Kernel
def _put_outside(item, scratch, place, out):
    """out[place] = 1"""
    put_int(out, place, 1)


@Kernel
def _put_into_scratch(item, scratch, place):
    put_int(scratch, place, 1)


@Kernel
def _get(item, scratch, place, source, out):
    put_int(out, 0, get_int(source, place))


@Kernel
def _copy_behind(item, scratch, source, out):
    put(out, NUM, get(source, NUM))


@Kernel
def _add_behind(item, scratch, source, out):
    put(out, NUM, get(source, NUM) + get(source, 0))


@OUTSIDE
def test_a_number_written_outside_of_a_result_is_found(place: int) -> None:
    out = EAGER.empty(NUM, dtype=torch.int32)
    with pytest.raises(
        AssertionError, match=f"_put_outside writes byte {4 * place} of 40 bytes of an argument"
    ):
        EAGER.call(_put_outside, 1, 0, place, out)
    EAGER.call(_put_outside, 1, 0, NUM - 1, EAGER.empty(NUM, dtype=torch.int32))


@OUTSIDE
def test_a_number_written_outside_of_scratch_is_found(
    place: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each thread, also where an earlier call left more room."""
    monkeypatch.setattr(kernel, "WORTH_A_THREAD", -1)
    for size in (4000, 4 * NUM):
        EAGER.call(_put_into_scratch, 8, 0.0, size // 4 - 1, scratch=size)
    with pytest.raises(AssertionError, match=f"_put_into_scratch: .*byte {4 * place} of 40 bytes of scratch"):
        EAGER.call(_put_into_scratch, 8, 0.0, place, scratch=4 * NUM)


@OUTSIDE
def test_a_number_read_outside_is_no_number(place: int) -> None:
    """Nor is a result that nobody has written."""
    source, out = EAGER.empty(NUM, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for at in (place, 3):
        EAGER.call(_get, 1, 0, at, source, out)
        assert out.item() >= MARK and out.view(torch.float32).isnan()


def test_what_is_read_outside_and_written_outside_is_found() -> None:
    """A NaN is still one behind a sum, and a copy has the same bits."""
    source, out = EAGER.empty(NUM), EAGER.empty(NUM)
    for behind in (_copy_behind, _add_behind):
        with pytest.raises(AssertionError, match=f"{behind.name} writes byte 40 of 40 bytes of an argument"):
            EAGER.call(behind, 1, 0, source, out)
        out = EAGER.empty(NUM)


def recorded(kernel: Kernel, *arguments: object, scratch: int = 0) -> RecordedStep:
    """A call on a result of its own, between calls that take more scratch."""
    code = Recorder()
    results = [code.empty(FreeSize("T"), 4, dtype=torch.int32) for _ in range(3)]
    code.call(_put_outside, 1, 0, 0, results[0], scratch=4000)
    code.call(kernel, 1, 0, *arguments, *([] if scratch else [results[1]]), scratch=scratch)
    code.call(_put_outside, 1, 0, 0, results[2], scratch=4000)
    return RecordedStep(code, ["T"])


@pytest.mark.parametrize("place", [-1, 12, 20])
def test_a_step_that_writes_outside_of_a_result_is_refused(place: int) -> None:
    with red_zones(engines=True):
        step = recorded(_put_outside, place)
        with pytest.raises(
            AssertionError, match=f"_put_outside writes byte {4 * place} of 48 bytes of a result"
        ):
            step.run({"T": 3})
        recorded(_put_outside, 11).run({"T": 3})


@pytest.mark.parametrize("place", [-1, NUM, NUM + 7])
def test_a_step_that_writes_outside_of_its_scratch_is_refused(place: int) -> None:
    """A call of the step that asks for more does not hide it."""
    with red_zones(engines=True):
        step = recorded(_put_into_scratch, place, scratch=4 * NUM)
        with pytest.raises(AssertionError, match="writes byte"):
            step.run({"T": 3})
        recorded(_put_into_scratch, NUM - 1, scratch=4 * NUM).run({"T": 3})
