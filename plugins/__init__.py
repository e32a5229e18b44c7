"""Importing this registers every op as torch.ops.hemiola.<name>."""

from types import SimpleNamespace

import torch

from hemiola.plugins.attention.spec import ATTENTION
from hemiola.plugins.conv.spec import CONV
from hemiola.plugins.delta.spec import DELTA
from hemiola.plugins.linear.spec import LINEAR
from hemiola.plugins.mamba2.spec import MAMBA2
from hemiola.plugins.moe.spec import MOE
from hemiola.plugins.norm.spec import NORM
from hemiola.plugins.spec import Op

OPS: tuple[Op, ...] = tuple(op.register() for op in (ATTENTION, CONV, DELTA, LINEAR, MAMBA2, MOE, NORM))
# torch.ops.hemiola.<name>.default -> what it runs on a CPU: called directly it spares 5 us of dispatching
on_cpu = {getattr(torch.ops.hemiola, op.name).default: op.cpu() for op in OPS}
references = SimpleNamespace(**{op.name: op.reference for op in OPS})  # name -> the truth, same arguments
