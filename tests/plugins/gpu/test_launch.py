"""A launcher's call finds the binary that was compiled for it, and no other."""

import threading
import weakref
from typing import Any

import pytest
import torch

from hemiola.plugins.gpu.launch import Block, Call, Kernel, NotCompiled, constants_of, kind_of, launches

HALF = torch.zeros(64, dtype=torch.bfloat16)


def launched(kernel: Kernel, *values: Any, **constants: Any) -> object:
    """Which of the kernel's binaries is launched, and with what."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "compile", None)
        kernel[(3,)](*values, **constants)
    return kernel.seen.pop()


def kernel_of(*calls: Call) -> Kernel:
    kernel = Kernel("op", "_it")
    kernel.seen = []
    for number, call in enumerate(calls):
        kernel.binaries[call] = lambda grid, values, number=number: kernel.seen.append((number, grid, values))
    return kernel


def call(*kinds: str, **constants: Any) -> Call:
    return Call("op._it", kinds, constants_of(constants))


@pytest.mark.parametrize(
    "value, told, untold",
    [
        (HALF, "*bf16:16", "*bf16?"),
        (HALF[1:], "*bf16", "*bf16?"),
        (HALF.int()[8:], "*i32?", "*i32?"),
        (Block(HALF, (16, 64)), "<bf16 16 64>", "<bf16 16 64>"),
        (1, "1", "i32?"),
        (0, "i32:16", "i32?"),
        (17, "i32", "i32?"),
        (-1, "i32", "i32?"),
        (2**31, "i64:16", "i32?"),
        (0.5, "fp32", "fp32"),
    ],
)
def test_kinds(value: Any, told: str, untold: str) -> None:
    assert kind_of(value) == told and kind_of(value, varies=True) == untold


def test_kinds_and_constants_choose_the_binary() -> None:
    kernel = kernel_of(
        call("*bf16:16", "i32", WIDE=True),
        call("*bf16:16", "i32:16", WIDE=True),
        call("*bf16", "i32?", WIDE=True),
        call("*bf16:16", "i32", WIDE=False, DTYPE=torch.bfloat16),
        call("<bf16 8 8>", "1", WIDE=True),
    )
    address = HALF.data_ptr()
    block = Block(HALF, (8, 8))
    for _ in range(2):  # searched for, then known
        assert launched(kernel, HALF, 3, WIDE=True) == (0, (3,), [address, 3])
        assert launched(kernel, HALF, 32, WIDE=True) == (1, (3,), [address, 32])
        assert launched(kernel, HALF[1:], 32, WIDE=True) == (2, (3,), [address + 2, 32])
        assert launched(kernel, HALF, 3, DTYPE=torch.bfloat16, WIDE=False) == (3, (3,), [address, 3])
        assert launched(kernel, block, 1, WIDE=True) == (4, (3,), [block, 1])


def test_what_no_binary_is_for_is_refused_in_one_line_with_the_way_out() -> None:
    kernel = kernel_of(call("*bf16:16", "i32", WIDE=True))
    wrong = [((HALF, 1), True), ((HALF, 3), False), ((HALF[1:], 3), True), ((HALF.float(), 3), True)]
    for values, wide in [*wrong, ((HALF,), True)]:
        with pytest.raises(
            NotCompiled, match=r"no binary of op\._it for \(.*WIDE=.*run build-engine"
        ) as caught:
            launched(kernel, *values, WIDE=wide)
        assert "\n" not in str(caught.value)


def test_inside_launches_nothing_else_sees_a_call() -> None:
    kernel, seen = kernel_of(), []
    with launches(lambda *call: seen.append(call)):
        kernel[(2, 3)](HALF, 3, WIDE=True)
    assert seen == [(kernel, (2, 3), (HALF, 3), {"WIDE": True})]


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_the_collector_finds_while_another_loads_leaves(fails: bool) -> None:
    """Who loads waits for the thread that leaves: a finalizer closes the engine, and that joins it."""
    kernel, old, new = kernel_of(), call("i32"), call("fp32")
    kernel.take(old, lambda: print)
    leaving = threading.Thread(target=kernel.leave, args=(old,), daemon=True)
    waited: list[bool] = []

    class Engine:
        pass

    def close() -> None:
        leaving.start()
        leaving.join(10)
        waited.append(leaving.is_alive())

    def load() -> Any:
        engine = Engine()
        weakref.finalize(engine, close)
        del engine
        if fails:
            raise MemoryError
        return print

    if fails:
        with pytest.raises(MemoryError):
            kernel.take(new, load)
    else:
        kernel.take(new, load)
    assert waited == [False]
    assert list(kernel.binaries) == ([] if fails else [new]), "who loads does what was left"
    kernel.take(old, lambda: print)
    kernel.leave(old)
    assert old not in kernel.binaries
