"""Importing this registers every op as torch.ops.hemiola.<name>."""

from types import SimpleNamespace

from hemiola.plugins.attention.spec import ATTENTION
from hemiola.plugins.conv.spec import CONV
from hemiola.plugins.delta.spec import DELTA
from hemiola.plugins.embed.spec import EMBED
from hemiola.plugins.fused_linear.spec import FUSED_LINEAR
from hemiola.plugins.gate.spec import GATE
from hemiola.plugins.linear.spec import LINEAR
from hemiola.plugins.linear_argmax.spec import LINEAR_ARGMAX
from hemiola.plugins.mamba2.spec import MAMBA2
from hemiola.plugins.moe.spec import MOE
from hemiola.plugins.norm.spec import NORM
from hemiola.plugins.rope.spec import ROPE
from hemiola.plugins.route.spec import ROUTE
from hemiola.plugins.spec import Op

OPS: dict[str, Op] = {
    op.name: op.register()
    for op in (
        ATTENTION,
        CONV,
        DELTA,
        EMBED,
        FUSED_LINEAR,
        GATE,
        LINEAR,
        LINEAR_ARGMAX,
        MAMBA2,
        MOE,
        NORM,
        ROPE,
        ROUTE,
    )
}
# Ops that other compilers have, too: plugins/onnx.py holds their bodies. The others hold states, look at
# other tokens, or choose.
DENSE = frozenset({"embed", "gate", "linear", "norm", "rope"})
FUSED = frozenset({"fused_linear", "linear_argmax"})  # of others, in engines of our own kernels only
references = SimpleNamespace(**{name: op.reference for name, op in OPS.items()})  # the truth, same arguments
