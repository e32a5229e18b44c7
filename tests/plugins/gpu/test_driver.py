"""What the driver is given, looked at in memory; no GPU is asked."""

import ctypes
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="needs cuda-bindings")

from hemiola.plugins.gpu import driver
from hemiola.plugins.gpu.binaries import Binary, TensorMap
from hemiola.plugins.gpu.launch import Block, Call

READ = {"*": ctypes.c_uint64, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def parameters(*kinds: str, maps: tuple[TensorMap, ...] = ()) -> driver.Parameters:
    return driver.Parameters(Binary(Call("op._it", kinds, ()), "it", 0, 128, maps, False))


def read(made: driver.Parameters, *kinds: str) -> list[object]:
    """Through the array of addresses, as cuLaunchKernel reads."""
    places = (ctypes.c_void_p * len(kinds)).from_address(made.address)
    return [READ[kind].from_address(place).value for kind, place in zip(kinds, places, strict=True)]


def test_arguments_stand_where_the_addresses_point() -> None:
    made = parameters("*bf16:16", "1", "i32", "i64:16", "fp32", "*i32?", "i32?")
    for shift in (0, 7):
        made.put([2**40 + shift, 1, -5, 2**33, 0.5, 2**50, 9])
        wanted = [2**40 + shift, -5, 2**33, 0.5, 2**50, 9, 0, 0]  # the 1 is compiled in; two of Triton's own
        assert read(made, "*", "i32", "i64", "fp32", "*", "i32", "*", "*") == wanted


def test_a_number_that_does_not_fit_raises() -> None:
    made = parameters("i32")
    with pytest.raises(Exception, match=r"format requires|out of range"):
        made.put([2**31])


def test_a_descriptor_comes_before_its_sizes_and_is_made_once_per_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = parameters("*bf16:16", "<bf16 4 8>", "i32", maps=(TensorMap(3, 9, 2, (4, 8)),))
    asked = []

    def describe(tensor: torch.Tensor, how: TensorMap) -> bytes:
        asked.append((tensor.data_ptr(), how.box))
        return bytes(range(128))

    monkeypatch.setattr(driver, "_describe", describe)
    x = torch.zeros(20, 40, dtype=torch.bfloat16)[:, :32]
    for _ in range(3):
        made.put([64, Block(x, (4, 8)), 5])
    assert asked == [(x.data_ptr(), (4, 8))]
    places = (ctypes.c_void_p * 9).from_address(made.address)
    assert places[1] % 64 == 0 and ctypes.string_at(places[1], 128) == bytes(range(128))
    assert [ctypes.c_int32.from_address(places[i]).value for i in (2, 3)] == [20, 32]
    assert [ctypes.c_int64.from_address(places[i]).value for i in (4, 5)] == [40, 1]
    assert ctypes.c_int32.from_address(places[6]).value == 5


def test_memory_of_one_kernel_is_not_that_of_another() -> None:
    one, other = parameters("i32"), parameters("i32")
    one.put([3])
    other.put([4])
    assert read(one, "i32", "*", "*") == [3, 0, 0] and read(other, "i32", "*", "*") == [4, 0, 0]


def test_a_binary_is_unloaded_when_nobody_can_launch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = []
    monkeypatch.setattr(driver.driver, "cuLibraryUnload", gone.append)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    binary = Binary(Call("op._it", (), ()), "it", 0, 128, (), False)
    launch = driver._launch(binary, "library", None, torch.device("cuda", 0))
    assert not gone
    del launch
    assert gone == ["library"]


@pytest.mark.parametrize("waits", [True, False])
def test_only_a_kernel_that_waits_may_begin_before_the_one_before_it_has_ended(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def start(config: Any, function: Any, parameters: int, extra: int) -> tuple[Any, ...]:
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        early = [(attr.id.name, attr.value.programmaticStreamSerializationAllowed) for attr in config.attrs]
        seen.append((grid, block, config.sharedMemBytes, int(config.hStream), config.numAttrs, early))
        return (driver.DONE,)

    monkeypatch.setattr(driver.driver, "cuLaunchKernelEx", start)
    monkeypatch.setattr(driver.driver, "cuLibraryUnload", lambda library: None)  # when `launch` is gone
    streams = iter((2**40, 7, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: next(streams), raising=False)
    binary = Binary(Call("op._it", ("i32",), ()), "it", 5000, 128, (), waits)
    launch = driver._launch(binary, None, driver.driver.CUfunction(1), torch.device("cuda", 0))
    for grid in ((3,), (4, 5), (6, 0), (7, 8, 9)):
        launch(grid, [1])
    allowed = [("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", 1)] if waits else []
    always = ((128, 1, 1), 5000)
    assert seen == [
        (grid, *always, stream, len(allowed), allowed)
        for grid, stream in (((3, 1, 1), 2**40), ((4, 5, 1), 7), ((7, 8, 9), 0))
    ]
