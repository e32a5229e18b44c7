"""Kernels as TensorRT gets them. How they compute is said by the interpreter and, from PTX, by tests/gpu."""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit import ahead as kit
from kit.ops import AHEAD, Subject

pytest.importorskip("triton", reason="needs Triton")

from triton.backends.nvidia.compiler import get_ptxas

from hemiola.builder.targets.trt import ptx
from hemiola.builder.targets.trt.ahead import NotAhead, plan
from hemiola.builder.targets.trt.dims import Dim, number
from hemiola.plugins.gpu import launch
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.sizes import evaluate
from hemiola.runtime.arch import ARCHS

GPUS = [name for name, arch in ARCHS.items() if arch.device == "cuda"]
QUICK = ("conv", "moe", "route")  # to compile; all ops for all architectures: benchmarks/tensorrt_ptx.py


@cache  # compiling takes seconds
def found(name: str, capability: int = 90) -> tuple[Subject, list[Any], ptx.Ahead]:
    own = AHEAD[name]
    values = kit.as_on_a_gpu(own.op, own.arguments(20))
    attrs = values[len(own.op.args) :]
    return own, values, ptx.ahead(own.op, kit.sized(own.op, values), attrs, Gpu(capability, 132))


@pytest.mark.parametrize("arch", GPUS)
def test_every_architectures_assembler_takes_it_with_the_parameters_that_tensorrt_passes(
    arch: str, tmp_path: Path
) -> None:
    major, minor = ARCHS[arch].capability or (0, 0)
    capability = 10 * major + minor

    def assemble(name: str) -> None:
        for entry in found(name, capability)[2].entries:
            head = re.search(r"\.visible \.entry (\w+)\((.*?)\)", entry.ptx, re.S)
            assert head is not None and head[1] == entry.name
            kinds = re.findall(r"\.param \.(\w+)", head[2])
            pointers = len(entry.inputs), len(entry.outputs)
            assert kinds == ["u64"] * pointers[0] + ["u32"] * len(entry.ints) + ["u64"] * pointers[1]
            assert entry.shared <= 48 * 1024
            file = tmp_path / entry.name
            file.write_text(entry.ptx)
            (target,) = re.findall(r"^\.target (\w+)", entry.ptx, re.M)
            command = [get_ptxas(capability).path, f"-arch={target}", str(file), "-o", str(file) + ".cubin"]
            made = subprocess.run(command, capture_output=True, text=True)
            assert made.returncode == 0, f"{arch} {entry.name}: {made.stderr}"

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(assemble, AHEAD if capability == 90 else QUICK))


def test_threads_that_plan_take_each_others_launches() -> None:
    """CI of 2026-11-28: one put back what the other still needed; the process launched nothing right then."""
    values = kit.as_on_a_gpu(AHEAD["conv"].op, AHEAD["conv"].arguments(20))

    def num_launches(_: int) -> int:
        sizes = kit.sized(AHEAD["conv"].op, values)
        return len(plan("conv", sizes, values[len(sizes) :], Gpu(90, 132), {}).launches)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(num_launches, range(100))) == {1}
    assert launch._instead is None


@pytest.mark.parametrize("name", AHEAD)
def test_a_written_tensor_goes_through_all_kernels_that_get_it(name: str) -> None:
    """So their order is that of the launcher, and no kernel reads what an earlier one has not made."""
    own, _, (own_plan, entries) = found(name)
    ready = {arg.name for arg in own.op.args}
    ready |= {tensor for tensor, memory in own_plan.memory.items() if memory.fill is not None}
    last: dict[str, str] = {}
    for entry in entries:
        assert set(entry.inputs) <= ready, entry.name
        written = set(entry.inputs) & (
            set(own_plan.memory) - {arg.name for arg in own.op.args if not arg.mutated}
        )
        ones = {tensor for tensor, memory in own_plan.memory.items() if memory.fill == 1}
        assert written - ones <= set(entry.outputs)
        ready |= set(entry.outputs)
        last |= dict.fromkeys(entry.outputs, entry.name)
    assert set(own_plan.results) | {arg.name for arg in own.op.args if arg.mutated} <= last.keys()


def test_the_code_stays_and_its_parameters_move() -> None:
    before = """
.visible .entry _k(
	.param .u64 .ptr .global .align 1 _k_param_0,
	.param .u32 _k_param_1,
	.param .f32 _k_param_2,
	.param .u64 .ptr .global .align 1 _k_param_3,
	.param .u32 _k_param_4,
	.param .u64 .ptr .global .align 1 _k_param_5,
	.param .u64 .ptr .global .align 1 _k_param_6,
	.param .u64 .ptr .global .align 1 _k_param_7
)
{
	ld.param.b64 	%rd1, [_k_param_0];
	ld.param.s32 	%rd2, [_k_param_1];
	ld.param.b32 	%r1, [_k_param_2];
	ld.param.b64 	%rd3, [_k_param_3];
	ld.param.b32 	%r2, [_k_param_4];
	ld.param.b64 	%rd4, [_k_param_5];
}"""
    rows = number(Dim.of("N", 8))
    values = ["y", -2, 0.5, "x", rows, None]
    after = ptx.rewritten(before, "k_1", values, ("x", "state"), (rows,), ("y", "state"))
    assert re.findall(r"\.param (\.\w+).* (\w+)", after) == [
        (".u64", "k_1_in_0"), (".u64", "k_1_in_1"), (".u32", "k_1_int_0"),
        (".u64", "k_1_out_0"), (".u64", "k_1_out_1"),
    ]  # fmt: skip
    assert re.findall(r"\t((?:ld|mov).*);", after) == [
        "ld.param.b64 \t%rd1, [k_1_out_0]",
        "mov.b64 \t%rd2, 0xfffffffffffffffe",
        "mov.b32 \t%r1, 0x3f000000",
        "ld.param.b64 \t%rd3, [k_1_in_0]",
        "ld.param.b32 \t%r2, [k_1_int_0]",
        "mov.b64 \t%rd4, 0x0",
    ]
    with pytest.raises(AssertionError, match="read in a way that is not known"):
        ptx.rewritten(before.replace("ld.param.b32", "ld.param.v2.b32"), "k", values, ("x",), (rows,), ("y",))


def test_a_kernel_with_a_descriptor_is_refused_by_name() -> None:
    from hemiola.plugins.gpu.tiles import Tile

    own = AHEAD["moe"]
    values = kit.as_on_a_gpu(own.op, own.arguments(20))
    tile = Tile(64, 64, 64, 4, 2, False, is_persistent=True)
    with pytest.raises(NotAhead, match=r"moe\._experts_persistent reads boxes .* descriptor \(TMA\)"):
        plan("moe", kit.sized(own.op, values), values[5:], Gpu(90, 132), {"tile": tile})


def test_a_kernel_that_needs_too_much_shared_memory_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ptx, "MOST_SHARED", 64)
    with pytest.raises(
        NotAhead, match=r"attention\._write needs 128 bytes of shared memory, TensorRT gives 64"
    ):
        found.__wrapped__("attention")


@pytest.mark.parametrize("name", AHEAD)
def test_a_launch_passes_inputs_ints_and_outputs_in_this_order(name: str) -> None:
    """As tests/gpu launch it, seen by a driver that only looks."""
    own, values, told = found(name)
    launches, results = kit.played(own.op, told, values)
    seen: list[tuple[Any, ...]] = []
    driver = SimpleNamespace(
        CUfunction=int,
        cuLibraryLoadData=lambda content, *rest: (0, content),
        cuLibraryGetKernel=lambda library, symbol: (0, 7 if b"entry " + symbol + b"(" in library else None),
        cuLaunchKernel=lambda *call: seen.append(call) or (0,),
    )
    for one in launches:
        kit.launch(driver, one, stream=5)
    sizes = kit.sizes_of(own.op, values)
    tensors = dict(zip((arg.name for arg in own.op.args), values, strict=False))
    for entry, (function, *size, shared, stream, (passed, kinds), _) in zip(told.entries, seen, strict=True):
        assert function == 7 and stream == 5 and shared == entry.shared and len(passed) == len(kinds)
        assert size == [evaluate(n, sizes) for n in entry.grid] + [entry.threads, 1, 1]
        assert all(n > 0 for n in size)
        count = len(entry.inputs)
        for tensor, address in zip(entry.inputs, passed, strict=False):
            assert tensor not in tensors or address == tensors[tensor].data_ptr()
        assert list(passed[count : count + len(entry.ints)]) == [evaluate(n, sizes) for n in entry.ints]
        places = dict(zip(entry.outputs, passed[count + len(entry.ints) :], strict=True))
        for tensor in set(entry.inputs) & places.keys():
            assert places[tensor] == passed[entry.inputs.index(tensor)]
        for tensor, result in zip(told.plan.results, results, strict=True):
            assert tensor not in places or places[tensor] == result.data_ptr()
