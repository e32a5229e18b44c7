"""Importing this registers every op as torch.ops.hemiola.<name>. A folder with `spec.py` is an op."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from hemiola.plugins.spec import Op


def _declared(folder: str) -> Op:
    """`plugins/conv/spec.py` declares CONV."""
    return getattr(import_module(f"hemiola.plugins.{folder}.spec"), folder.upper())


_folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/spec.py"))
OPS: dict[str, Op] = {name: _declared(name).register() for name in _folders}
references = SimpleNamespace(**{name: op.reference for name, op in OPS.items()})  # the truth, same arguments
