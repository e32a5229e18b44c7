"""Importing this registers every op as torch.ops.hemiola.<name>."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

from hemiola.plugins.attention.spec import ATTENTION
from hemiola.plugins.linear.spec import LINEAR
from hemiola.plugins.moe.spec import MOE
from hemiola.plugins.norm.spec import NORM
from hemiola.plugins.spec import Op

_others = [
    getattr(import_module(f"hemiola.plugins.{name}.spec"), name.upper())
    for name in ("conv", "mamba2", "delta")
    if len(list((Path(__file__).parent / name).glob("[cers]*.py"))) >= 3
]

OPS: tuple[Op, ...] = tuple(op.register() for op in (ATTENTION, *_others, LINEAR, MOE, NORM))
references = SimpleNamespace(**{op.name: op.reference for op in OPS})
