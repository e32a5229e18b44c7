"""Calls of our ops as on a GPU, and the launches that were planned ahead (builder/targets/trt/ahead.py)."""

from collections.abc import Collection, Sequence
from ctypes import c_int32, c_void_p
from math import prod
from typing import Any, NamedTuple

import torch
from kit.ops import Subject, int32, row

from hemiola.builder.targets.trt.ahead import Memory, Sized, plan, ways
from hemiola.builder.targets.trt.dims import Dim
from hemiola.builder.targets.trt.ptx import Ahead, PtxKernel
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.sizes import FreeSize, evaluate
from hemiola.plugins.spec import Arg, Op

MOST = {"T": 256, "N": 8, "W": 64, "S": 9, "Z": 200}  # sizes of the largest step, by letter

CHUNK = 16
# of 20 tokens: a prompt beyond an edge and one token; then the prompt's next 14 beyond another, one a draft
FIRST = [row(num_tokens=19), row(first=19, num_tokens=1, slot=2)]
SECOND = [
    row(num_tokens=14, num_drafts=1, committed=19, edge=CHUNK),
    row(first=14, num_tokens=3, slot=2, committed=1),
]
STEPS = [(20, FIRST, [*range(19), 0]), (20, SECOND, [*range(19, 33), 1, 2, 3, 0, 0, 0])]


def arguments(
    subject: Subject,
    step: int,
    states: list[torch.Tensor],
    device: str = "cpu",
    exact: Collection[str] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> list[Any]:
    """As an engine for a GPU has them; three tokens of the second step are nobody's."""
    num_tokens, rows, positions = STEPS[step]
    given, left = subject.arguments(num_tokens, seed=step), list(states)
    page_table = subject.make("page_table", 0, 0) if subject.name == "attention" else None
    for index, arg in enumerate(subject.op.args):
        if arg.mutated:
            given[index] = left.pop(0) if left else given[index]
        elif arg.name == "rows":
            given[index] = int32(*rows)
        elif arg.name == "positions":
            given[index] = int32(*positions)
        elif arg.name == "page_table":
            given[index] = page_table
    return as_on_a_gpu(subject.op, given, device, exact, dtype)


def states_of(subject: Subject, given: list[Any]) -> list[torch.Tensor]:
    return [value for arg, value in zip(subject.op.args, given, strict=False) if arg.mutated]


def as_on_a_gpu(
    op: Op,
    values: Sequence[Any],
    device: str = "cpu",
    wide: Collection[str] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> list[Any]:
    """In an engine's dtype but for what is wide there."""
    given = []
    for arg, value in zip(op.args, values, strict=False):
        is_wide = torch.bfloat16 not in arg.dtypes or arg.name in wide
        given.append((value if is_wide else value.to(dtype)).to(device))
    return [*given, *values[len(op.args) :]]


def varying(op: Op, arg: Arg, value: torch.Tensor) -> str:
    """By dimension its letter, a dash where steps do not differ."""
    letters = "TNSZW" if op.name == "attention" else "TNS"
    return "".join(c if c in letters and value.numel() else "-" for c in arg.shape)[: value.dim()]


def sized(op: Op, values: Sequence[Any]) -> dict[str, Sized]:
    """The tensors of a call as they are in the largest step."""
    found = {}
    for arg, value in zip(op.args, values, strict=False):
        dims = zip(varying(op, arg, value), value.shape, strict=True)
        found[arg.name] = Sized(tuple(Dim.of(c, MOST[c]) if c in MOST else n for c, n in dims), value.dtype)
    return found


def sizes_of(op: Op, values: Sequence[Any]) -> dict[str, int]:
    """What this step has of each."""
    pairs = zip(op.args, values, strict=False)
    return {c: n for arg, value in pairs for c, n in zip(varying(op, arg, value), value.shape, strict=True)}


def make(memory: Memory, sizes: dict[str, int], device: str = "cpu") -> torch.Tensor:
    """Fresh memory, poisoned where nobody says what is in it."""
    shape = [evaluate(size, sizes) for size in memory.shape]
    if memory.fill is not None:
        return torch.full(shape, memory.fill, dtype=memory.dtype, device=device)
    poison = torch.full((prod(shape) * memory.dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
    return poison.view(memory.dtype).view(shape)


def interpreted(op: Op, *values: Any) -> tuple[torch.Tensor, ...]:
    """A call as its plan has it, kernel by kernel, in Triton's interpreter."""
    from kit.triton_launcher import launched_by_triton

    attrs, gpu = values[len(op.args) :], Gpu(90, 2)  # few programs: each costs 20 ms
    given, sizes = sized(op, values), sizes_of(op, values)
    (*_, options) = ways(op.name, given, attrs, gpu)
    own = plan(op.name, given, attrs, gpu, options)
    tensors = {name: make(memory, sizes) for name, memory in own.memory.items() if name not in given}
    tensors |= dict(zip(given, values, strict=False))

    def told(value: Any) -> Any:
        if isinstance(value, str):
            return tensors[value]
        return (
            torch.empty(0)
            if value is None
            else evaluate(value, sizes)
            if isinstance(value, FreeSize)
            else value
        )

    for launch in own.launches:
        grid = tuple(evaluate(size, sizes) for size in launch.grid)
        with launched_by_triton():
            launch.kernel[grid](*map(told, launch.values), **launch.constants)
    return tuple(tensors[name] for name in own.results)


class Played(NamedTuple):
    """A launch as TensorRT would make it."""

    entry: PtxKernel
    grid: tuple[int, ...]
    values: tuple[int, ...]  # inputs, ints, outputs
    kinds: tuple[type, ...]  # of ctypes


def played(
    op: Op, found: Ahead, values: Sequence[Any], device: str = "cpu"
) -> tuple[list[Played], tuple[torch.Tensor, ...]]:
    """All launches of a call, and where its results will be."""
    given, sizes = sized(op, values), sizes_of(op, values)
    memory = found.plan.memory
    tensors = {name: make(own, sizes, device) for name, own in memory.items() if name not in given}
    tensors |= dict(zip(given, values, strict=False))
    launches = []
    for entry in found.entries:
        inputs, outputs = (
            [tensors[name].data_ptr() for name in part] for part in (entry.inputs, entry.outputs)
        )
        ints = [evaluate(term, sizes) for term in entry.ints]
        kinds = [c_void_p] * len(inputs) + [c_int32] * len(ints) + [c_void_p] * len(outputs)
        grid = tuple(evaluate(size, sizes) for size in entry.grid)
        launches.append(Played(entry, grid, (*inputs, *ints, *outputs), tuple(kinds)))
    return launches, tuple(tensors[name] for name in found.plan.results)


def launch(driver: Any, one: Played, stream: int) -> None:
    """By the CUDA driver, from PTX."""
    library = done(driver.cuLibraryLoadData(one.entry.ptx.encode() + b"\0", [], [], 0, [], [], 0))
    kernel = done(driver.cuLibraryGetKernel(library, one.entry.name.encode()))
    function = driver.CUfunction(int(kernel))
    sizes = (*one.grid, one.entry.threads, 1, 1, one.entry.shared)
    done(driver.cuLaunchKernel(function, *sizes, stream, (one.values, one.kinds), 0))


def done(answer: tuple[Any, ...]) -> Any:
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) > 1 else None
