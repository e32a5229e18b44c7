"""Kernels into binaries, by Triton and its Gluon. No GPU is needed, and no engine needs this once built.

plugins/gpu/cover.py says what an op calls; `compile_call` makes one of these for an architecture: the cubin,
the PTX, and how it is launched.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.runtime.jit import JITFunction

from hemiola.plugins.gpu import overlap
from hemiola.plugins.gpu.binaries import Binary, TensorMap
from hemiola.plugins.gpu.device import SHARED, gpu_of
from hemiola.plugins.gpu.launch import (
    ALIGNMENT,
    ANY,
    ONE,
    Call,
    Constant,
    Kernel,
    Values,
    constants_of,
    kind_of,
)

DTYPES = {
    "bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32, "fp8e4nv": tl.float8e4nv, "i16": tl.int16,
}  # fmt: skip
FILES = "triton", "gluon", "gluon_steps", "gluon_few", "gluon_e4m3"  # of an op, in which its kernels stand
ITEMS = {8: 10, 9: 8, 10: 9}  # where PTX numbers the items of tensor maps otherwise than the driver


_PARSING, _parse = threading.Lock(), JITFunction.parse


def _parse_alone(self: JITFunction) -> Any:
    """Two threads in Python 3.11's ast.parse fail: "AST constructor recursion depth mismatch"."""
    with _PARSING:
        return _parse(self)


JITFunction.parse = _parse_alone
knobs.runtime.add_stages_inspection_hook = overlap.hook  # pyright: ignore[reportAttributeAccessIssue]


class Compiled(NamedTuple):
    """A kernel for one call and one architecture."""

    binary: Binary
    cubin: bytes
    ptx: str


class TooLarge(ValueError):
    """A kernel needs more than an architecture has; the message is one line."""


def source(kernel: str) -> Any:
    """Triton's function; what triton.py does not have is Gluon's, for one architecture."""
    op, _, entry = kernel.rpartition(".")
    for file in FILES:
        if function := getattr(import_module(f"hemiola.plugins.{op}.{file}"), entry, None):
            return function
    raise AttributeError(f"no file of hemiola.plugins.{op} has {entry}")


def call_of(kernel: Kernel, values: Values, constants: Mapping[str, Any]) -> Call:
    """What must be compiled for a launch."""
    parameters = source(kernel.name).params
    kinds = [
        kind_of(value, parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        for parameter, value in zip(parameters, values, strict=False)
    ]
    return Call(kernel.name, tuple(kinds), constants_of(constants))


@contextmanager
def without_lines() -> Iterator[None]:
    """No numbers of lines, half of a cubin, in what all threads compile until this ends."""
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        yield


def compile_call(call: Call, capability: int) -> Compiled:
    """capability: 90 for sm_90. Raises TooLarge."""
    function = source(call.kernel)
    names, given = function.arg_names, dict(call.constants)
    is_gluon = function.is_gluon()
    signature = {name: _signature(kind, is_gluon) for name, kind in zip(names, call.kinds, strict=False)}
    fixed: dict[str, Any] = {name: 1 for name, kind in zip(names, call.kinds, strict=False) if kind == ONE}
    fixed |= {name: _constant(value) for name, value in given.items() if name in names}
    signature |= {name: "constexpr" for name in names if name in given}
    aligned = {
        (index,): [["tt.divisibility", ALIGNMENT]]
        for index, kind in enumerate(call.kinds)
        if kind.endswith(f":{ALIGNMENT}")
    }
    waits = capability >= overlap.FIRST
    options = {name: value for name, value in given.items() if name not in names} | {"launch_pdl": waits}
    parsed = (GluonASTSource if is_gluon else ASTSource)(function, signature, fixed, aligned)
    made = triton.compile(parsed, GPUTarget("cuda", capability, 32), options)
    about = made.metadata
    if about.shared > SHARED[capability]:
        raise TooLarge(
            f"{call.kernel} needs {about.shared} bytes of shared memory, sm_{capability} has"
            f" {SHARED[capability]}"
        )
    assert about.global_scratch_size == 0 and about.profile_scratch_size == 0, call
    assert about.num_ctas == 1 and not about.launch_cooperative_grid, call
    assert (overlap.WAIT in made.asm["ptx"]) == waits, f"{call.kernel}: compiled without overlap.hook"
    maps = tuple(
        TensorMap(
            meta["swizzle"],
            ITEMS.get(item := int(meta["elem_type"]), item),
            meta["elem_size"],
            tuple(meta["block_size"]),
        )
        for meta in about.tensordesc_meta or ()
    )
    binary = Binary(call, about.name, about.shared, 32 * about.num_warps, maps, waits)
    return Compiled(binary, made.asm["cubin"], made.asm["ptx"])


def cuda_version(capability: int) -> str:
    """Of the assembler: a driver of another major version may be too old for what it makes."""
    return get_ptxas(capability).version


def on_demand() -> None:
    """From now on kernels are compiled at their first call, for the GPU at hand: tests and benchmarks."""
    from hemiola.plugins.gpu import driver  # needs cuda-python

    def make(kernel: Kernel, values: Values, constants: Mapping[str, Any]) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        with without_lines():
            compiled = compile_call(call_of(kernel, values, constants), gpu_of(device).capability)
        kernel.binaries[compiled.binary.call] = driver.load(compiled.binary, compiled.cubin, device)

    Kernel.compile = make


def _signature(kind: str, is_gluon: bool = False) -> str:
    """As Triton writes a type; Gluon says how a box lies in shared memory."""
    if kind == ONE:
        return "constexpr"
    if match := re.fullmatch(r"<(\w+) ([\d ]+)>", kind):
        box = [int(size) for size in match[2].split()]
        layout = f",{layout_of(box, match[1])!r}" if is_gluon else ""
        return f"tensordesc<{match[1]}{box}{layout}>"
    return kind.removesuffix(ANY).removesuffix(f":{ALIGNMENT}")


def layout_of(box: list[int], word: str) -> Any:
    """How a box lies in shared memory, to Gluon."""
    return NVMMASharedLayout.get_default_for(box, DTYPES[word])


def _constant(value: Constant) -> Any:
    return DTYPES.get(value, value) if isinstance(value, str) else value
