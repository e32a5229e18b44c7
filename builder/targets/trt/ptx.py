"""Kernels as TensorRT launches them by itself: pointers to inputs, 32-bit ints, pointers to outputs.

What Triton compiles gets its arguments in another order, floats and constants among them, and two null
pointers. The code stays as it is; its parameters are declared anew, in TensorRT's order, and what is the same
in every step becomes a constant. A tensor that kernels may write goes through all kernels that get it: an
input of each, which comes out at the address where it came in.
"""

import hashlib
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from hemiola.builder.targets.trt.ahead import Launch, LaunchPlan, Memory, NotAhead, Sized, plan, ways
from hemiola.builder.targets.trt.dims import Dim, places_of
from hemiola.plugins.gpu.compile import Compiled, TooLarge, call_of, compile_call
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.gpu.launch import ONE, Call
from hemiola.plugins.sizes import FreeSize, Number, names_of
from hemiola.plugins.spec import Op

MOST_SHARED = 48 * 1024  # bytes that a launch may have without asking the driver, which TensorRT may not do
ANY_INT = 17  # of which a kernel is told nothing: neither 1 nor a multiple of 16
STAGES = {"num_stages": 3, "STAGES": 1}  # of loads under way: constants that may be less, and their defaults
ENTRY = re.compile(r"\.visible \.entry (\w+)\(([^)]*)\)")


class PtxKernel(NamedTuple):
    """One kernel of an op. Its tensors have the names of the op's plan."""

    name: str  # of PTX's entry and of the plugin: by content
    ptx: str
    threads: int
    shared: int  # bytes
    grid: tuple[Number, ...]  # three
    inputs: tuple[str, ...]
    ints: tuple[FreeSize, ...]
    outputs: tuple[str, ...]  # first what it makes; then inputs, each where it came in

    def made(self) -> tuple[str, ...]:
        return tuple(name for name in self.outputs if name not in self.inputs)


class Ahead(NamedTuple):
    """An op as kernels that need no launcher."""

    plan: LaunchPlan
    entries: tuple[PtxKernel, ...]


def ahead(op: Op, given: Mapping[str, Sized], attrs: Sequence[Any], gpu: Gpu) -> Ahead:
    """The first way that the launcher offers which can be told beforehand. Raises NotAhead."""
    mutated = [arg.name for arg in op.args if arg.mutated]
    reason = NotAhead("")
    for options in ways(op.name, given, attrs, gpu):
        try:
            launch_plan = plan(op.name, given, attrs, gpu, options)
            return Ahead(launch_plan, entries(launch_plan, mutated, op.name, gpu.capability))
        except NotAhead as error:
            reason = error
    raise reason


def entries(plan: LaunchPlan, mutated: Collection[str], op: str, capability: int) -> tuple[PtxKernel, ...]:
    """All kernels of an op, in order. Raises NotAhead."""
    written = {name for name, memory in plan.memory.items() if name.startswith("made_") and memory.fill != 1}
    written |= set(mutated)
    ready = {name for name, memory in plan.memory.items() if name not in written or memory.fill == 0}
    ready |= set(mutated)
    done = []
    for launch in plan.launches:
        tensors = dict.fromkeys(value for value in launch.values if isinstance(value, str))
        inputs = [name for name in tensors if name in ready]
        made = [name for name in tensors if name not in ready]
        ints = tuple(dict.fromkeys(value for value in launch.values if isinstance(value, FreeSize)))
        grid = (*launch.grid, 1, 1)[:3]
        sizes = [*grid, *ints, *(size for name in made for size in plan.memory[name].shape)]
        inputs += _lenders(sizes, inputs, plan.memory)
        outputs = (*made, *(name for name in inputs if name in written))
        done.append(_entry(launch, op, capability, grid, tuple(inputs), ints, outputs, plan.memory))
        ready |= set(made)
    return tuple(done)


def _lenders(sizes: list[Number], inputs: list[str], memory: dict[str, Memory]) -> Iterator[str]:
    """Tensors that the kernel does not read, for the sizes that only they have."""
    wanted = set().union(*map(names_of, sizes))
    for name in inputs:
        wanted -= set(places_of(memory[name].shape))
    for name, tensor in memory.items():
        if not wanted:
            return
        if not name.startswith("made_") and wanted & set(places_of(tensor.shape)):
            wanted -= set(places_of(tensor.shape))
            yield name
    assert not wanted, wanted


def _entry(
    launch: Launch,
    op: str,
    capability: int,
    grid: tuple[Number, ...],
    inputs: tuple[str, ...],
    ints: tuple[FreeSize, ...],
    outputs: tuple[str, ...],
    memory: dict[str, Memory],
) -> PtxKernel:
    compiled = _compile(launch, capability)
    kinds = compiled.binary.call.kinds
    values = [value for value, kind in zip(launch.values, kinds, strict=True) if kind != ONE]
    binary, about = compiled.binary, (grid, ints, *((name, memory[name]) for name in (*inputs, *outputs)))
    digest = hashlib.sha256(f"{compiled.ptx}{values}{about}{inputs}".encode()).hexdigest()[:12]
    name = f"{op}{launch.kernel.entry}_{digest}"
    ptx = rewritten(compiled.ptx, name, values, inputs, ints, outputs)
    return PtxKernel(name, ptx, binary.threads, binary.shared, grid, inputs, ints, outputs)


def _compile(launch: Launch, capability: int) -> Compiled:
    """With fewer stages than the launcher wants, if that much shared memory is not to be had."""
    values = [ANY_INT if isinstance(value, Dim) else value for value in launch.sample]
    stages = {name: launch.constants.get(name, default) for name, default in STAGES.items()}
    needed = ""
    for fewer in range(max(stages.values()), 0, -1):
        fewer_stages = {name: min(number, fewer) for name, number in stages.items() if number > fewer}
        try:
            compiled = _compiled(call_of(launch.kernel, values, launch.constants | fewer_stages), capability)
        except TooLarge:
            continue
        if compiled.binary.shared <= MOST_SHARED:
            return compiled
        needed = f" {compiled.binary.shared} bytes"
    raise NotAhead(
        f"{launch.kernel.name} needs{needed or ' more'} of shared memory, TensorRT gives {MOST_SHARED}"
    )


@lru_cache(maxsize=1024)
def _compiled(call: Call, capability: int) -> Compiled:
    return compile_call(call, capability)


def rewritten(
    ptx: str,
    name: str,
    values: list[Any],
    inputs: tuple[str, ...],
    ints: tuple[FreeSize, ...],
    outputs: tuple[str, ...],
) -> str:
    """The same code with other parameters. `values` are the old ones'; behind them stand two of Triton's."""
    head = ENTRY.search(ptx)
    assert head is not None
    old = re.findall(r"\w+_param_\d+", head[2])
    assert len(old) == len(values) + 2, f"{name}: {len(old)} parameters for {len(values)} values"
    places = {tensor: f"{name}_in_{i}" for i, tensor in enumerate(inputs)}
    counts = {term: f"{name}_int_{i}" for i, term in enumerate(ints)}
    results = [f"{name}_out_{i}" for i in range(len(outputs))]
    made = {tensor: results[i] for i, tensor in enumerate(outputs) if tensor not in places}
    known = places | made
    new = {
        before: known[value]
        if isinstance(value, str)
        else counts[value]
        if isinstance(value, FreeSize)
        else value
        for before, value in zip(old, values, strict=False)
    }

    def load(match: re.Match[str]) -> str:
        kind, register, before = match.groups()
        value = new[before]  # the two of Triton's own are not read
        if isinstance(value, str):
            return f"ld.param.{kind} \t{register}, [{value}]"
        width = 64 if register.startswith("%rd") else 32  # a load may widen
        return f"mov.b{width} \t{register}, 0x{_bits(value) & ((1 << width) - 1):x}"

    declared = [f"\t.param .u64 .ptr .global .align 1 {place}" for place in places.values()]
    declared += [f"\t.param .u32 {count}" for count in counts.values()]
    declared += [f"\t.param .u64 .ptr .global .align 1 {place}" for place in results]
    start, body = ptx[: head.start()], ptx[head.end() :]
    body = re.sub(r"ld\.param\.([bsf](?:32|64))\s+(%rd?\d+), \[(\w+_param_\d+)\]", load, body)
    assert "_param_" not in body, f"{name}: a parameter is read in a way that is not known here"
    start = start.replace(f".globl\t{head[1]} ", f".globl\t{name} ")
    return f"{start}.visible .entry {name}(\n" + ",\n".join(declared) + f"\n){body}"


def _bits(value: float | None) -> int:
    """Of an address, an int or an fp32; nothing is a null pointer."""
    return struct.unpack("<I", struct.pack("<f", value))[0] if isinstance(value, float) else value or 0
