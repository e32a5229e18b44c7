"""The ops around the trunk of a step: they read a plan and the ledger, and write the ledger. A folder with
`spec.py` is an op; engine programs cannot call them."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from hemiola.plugins.spec import Op


def _declared(folder: str) -> Op:
    """`plugins/step/fill/spec.py` declares FILL."""
    return getattr(import_module(f"hemiola.plugins.step.{folder}.spec"), folder.upper())


STEP_OPS: dict[str, Op] = {
    name: _declared(name)
    for name in sorted(path.parent.name for path in Path(__file__).parent.glob("*/spec.py"))
}


def import_forms(name: str) -> None:
    """All ops' modules of this form, which make its kernels known."""
    for op, spec in STEP_OPS.items():
        if _has(spec, name):
            import_module(f"hemiola.plugins.step.{op}.{name}")


def forms(name: str) -> SimpleNamespace:
    """All ops that have this form, compiled (CPU) or cuda, each a function of the op's arguments; or the
    references."""
    if name == "reference":
        return SimpleNamespace(**{op: spec.reference for op, spec in STEP_OPS.items()})
    return SimpleNamespace(**{op: spec.bind(name, ()) for op, spec in STEP_OPS.items() if _has(spec, name)})


def _has(spec: Op, name: str) -> bool:
    """Whether it has the form; those of ranks have none on a GPU yet."""
    return any(form.name == name for form in spec.forms)
