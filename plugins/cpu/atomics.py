"""What threads tell each other by: numbers that are read and written as one, in an order that all see; and
what they ask the system."""

from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from hemiola.plugins.cpu.registers import CPU
from hemiola.plugins.cpu.simd import I32, LONG, intrinsic

# By architecture, the intrinsic that tells a core that it waits, and what it is given.
HINTS = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [1])}


def _word(builder: Any, address: Any, offset: Any) -> Any:
    return builder.gep(builder.inttoptr(address, LONG.as_pointer()), [offset])


@intrinsic
def acquire(typing: Any, address: Any, offset: Any) -> Any:
    """The int64 number there, and all that its writer had written before it."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, *args), ordering="acquire", align=8)

    return types.int64(types.int64, types.int64), build


@intrinsic
def release(typing: Any, address: Any, offset: Any, value: Any) -> Any:
    """Put an int64 number there, after all that was written before."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _word(builder, args[0], args[1]), ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build


@intrinsic
def count_up(typing: Any, address: Any, offset: Any) -> Any:
    """The number there becomes one more, for all to see in one order."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, *args), LONG(1), "seq_cst")

    return types.int64(types.int64, types.int64), build


@intrinsic
def exchange(typing: Any, address: Any, offset: Any, expected: Any, value: Any) -> Any:
    """Whether the number there was the expected one and is now the other."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _word(builder, args[0], args[1])
        found = builder.cmpxchg(place, args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64, types.int64), build


def _c_function(name: str, *given: Any) -> Any:
    """A function of the C library that takes numbers or addresses and returns an int."""

    def function(typing: Any, *kinds: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(I32, [LONG] * len(args))
            callee = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.sext(builder.call(callee, args), LONG)

        return types.int64(*given), build

    names, kind = ["typing", *(f"given_{n}" for n in range(len(given)))], Parameter.POSITIONAL_OR_KEYWORD
    vars(function)["__signature__"] = Signature([Parameter(name, kind) for name in names])  # numba reads it
    return intrinsic(function)


sched_yield = _c_function("sched_yield")
usleep = _c_function("usleep", types.int64)
sem_wait = _c_function("sem_wait", types.int64)
sem_post = _c_function("sem_post", types.int64)
clock_gettime = _c_function("clock_gettime", types.int64, types.int64)


@intrinsic
def pause(typing: Any) -> Any:
    """Let the other thread of this core go first while we wait."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name, given = HINTS.get(CPU[0].partition("-")[0], ("llvm.donothing", []))
        kind = ir.FunctionType(ir.VoidType(), [I32] * len(given))
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [I32(n) for n in given])
        return context.get_dummy_value()

    return types.void(), build
