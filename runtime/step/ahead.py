"""Kernels for this CPU, compiled before a request needs them."""

from collections.abc import Iterable
from functools import partial

from hemiola.plugins import OPS
from hemiola.plugins.step import import_forms
from hemiola.runtime.progress import Report


def compile_ahead(ops: Iterable[str], report: Report) -> None:
    """Those of these ops, and of what steps of any options call beside them."""
    report("importing", 0, 0)
    from hemiola.plugins.cpu import jit  # numba is not needed elsewhere
    from hemiola.runtime.device import lower  # noqa: F401  its kernels are known when it is imported
    from hemiola.runtime.step import recorded  # noqa: F401

    import_forms("compiled")
    for op in ops:
        if any(form.name == "compiled" for form in OPS[op].forms):
            OPS[op].module("compiled")
    jit.prepare(partial(report, "compiling kernels"))
