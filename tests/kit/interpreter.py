"""Triton's interpreter (3.6) in half the time, and with products whose bits are those of any CPU.

What else it computes and checks stays the same.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Without what it does for nothing, which took more than half of its time.

    It asks whether a sum overflows, by ten operations, and nobody looks at the answer unless `debug` is set.
    It patches the language for each call of a function, which the kernel around it had done. It makes a table
    of all dtypes to look up one.
    """
    builder, patch = interpreter.interpreter_builder, interpreter._patch_lang
    launch, patched = interpreter.GridExecutor.__call__, set[int]()
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    @lru_cache
    def languages(fn: Callable[..., Any]) -> frozenset[int]:
        modules = (value for value in fn.__globals__.values() if isinstance(value, ModuleType))
        return frozenset(id(module) for module in modules if module in (tl, tl.core))

    def patch_once(fn: Callable[..., Any]) -> Any:
        if languages(fn) <= patched:
            return interpreter._LangPatchScope()
        patched.update(languages(fn))
        return patch(fn)

    def launch_afresh(self: Any, *arguments: Any, **constants: Any) -> None:
        patched.clear()
        launch(self, *arguments, **constants)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_afresh
    interpreter._get_np_dtype = number_of


def round_products_once() -> None:
    """numpy's fp32 product of matrices adds in an order that depends on shapes and CPUs, and so do bits.

    In fp64 sums of bf16's products are exact, and others off by less than fp32 sees.
    """
    builder = type(interpreter.interpreter_builder)
    multiply = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if d.data.dtype != np.float32 or a.data.dtype.kind != "f":
            return multiply(self, a, b, d, *how)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    builder.create_dot = create_dot


_number_of = lru_cache(interpreter._get_np_dtype)


def number_of(dtype: tl.dtype) -> np.dtype:
    """As numpy has it."""
    one = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return np.dtype(np.uint64) if isinstance(one, tl.pointer_type) else _number_of(one)
