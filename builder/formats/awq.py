"""AWQ (GEMM): X.qweight I32 [F, O / 8], X.qzeros I32 [G, O / 8], X.scales [G, O]; 4 bits."""

import torch

from hemiola.builder.formats.declared import Declared
from hemiola.builder.formats.module import Format, LazyGroup, Module, centred, unpacked
from hemiola.plugins.groups import Layout, WeightGroup

KEY = "qweight"
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word the nibbles of eight neighbouring outputs are
MIDDLE = 8


def is_awq(module: Module) -> bool:
    num_words = module.num_outputs // 8
    is_packed = KEY in module.tensors and module.num_outputs % 8 == 0
    return is_packed and module.of(KEY).shape == (module.num_inputs, num_words)


def find(module: Module, declared: Declared) -> LazyGroup:
    words, scales, zeros, span = module.packed_words(declared.group_sizes, module.num_outputs // 8)
    layout = Layout("int4", span, ("zeros",))

    def read(begin: int = 0, end: int | None = None) -> WeightGroup:
        first, last = begin // 8, -(-(module.num_outputs if end is None else end) // 8)
        outputs = slice(begin - 8 * first, None if end is None else end - 8 * first)
        read = (_in_order(each.read(first, last, 1))[:, outputs].T for each in (words, zeros))
        codes, points = (centred(each.contiguous(), MIDDLE) for each in read)
        tensors = {"codes": codes, "zeros": points.short()}
        return WeightGroup(layout, tensors | {"scales": scales.scales(begin, end, 1).T.contiguous()})

    return LazyGroup(layout, read)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, O / 8] as [n, O]."""
    return unpacked(words, 4).unflatten(-1, (-1, 8))[..., PLACES].flatten(-2)


FORMATS = (Format("AWQ", ("awq", "auto-round"), frozenset(("qweight", "scales", "qzeros")), is_awq, find),)
