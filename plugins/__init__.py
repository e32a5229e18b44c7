"""Importing this registers every op as torch.ops.hemiola.<name>. A folder with `spec.py` is an op."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from hemiola.plugins.spec import Op


def _declared(folder: str) -> Op:
    """`plugins/conv/spec.py` declares CONV."""
    return getattr(import_module(f"hemiola.plugins.{folder}.spec"), folder.upper())


_folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/spec.py"))
_declarations = [_declared(name) for name in _folders]
OPS: dict[str, Op] = {
    op.name: op.register() for declaration in _declarations for op in declaration.every_ending()
}
references = SimpleNamespace(**{op.name: op.reference for op in _declarations})  # the truth, same arguments
