"""An output head that stands apart from its program: logits, or no more than the best tokens, when asked."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from hemiola.plugins import OPS
from hemiola.plugins.groups import Layout
from hemiola.runtime.manifest_parts import HeadCall, Segment


class Best(NamedTuple):
    """Of each line that chooses: its highest logit, and the lowest token that has it.

    The logit is infinite where one is NaN.
    """

    logit: torch.Tensor  # [L] fp32
    token_id: torch.Tensor  # [L] int64


Logits = Callable[[torch.Tensor], torch.Tensor]  # of lines of hidden states [L, F]: [L, V] fp32


class Head(NamedTuple):
    """From lines of hidden states [L, F]."""

    logits: Logits
    best: Callable[[torch.Tensor], Best]


def bind_head(segment: Segment, weights: Mapping[str, torch.Tensor]) -> Head | None:
    """With its forms and weights. None: the program computes logits itself."""
    if not segment.head:
        return None
    compute, choose = (_bound(call, segment, weights) for call in segment.head)
    return Head(lambda lines: compute(lines).float(), lambda lines: Best(*choose(lines)))


def bind_scores(segment: Segment, weights: Mapping[str, torch.Tensor]) -> Logits | None:
    """Logits of any lines, as those that choose tokens. None: the segment is cut into pieces."""
    if segment.scores is None:
        return None
    compute = _bound(segment.scores, segment, weights)
    return lambda lines: compute(lines).float()


def _bound(
    call: HeadCall, segment: Segment, weights: Mapping[str, torch.Tensor]
) -> Callable[..., torch.Tensor]:
    op, tensors = OPS[call.op], [weights[name] for name in call.weights]
    named = zip((arg.name for arg in op.args[1:]), call.weights, strict=True)
    layouts = {name: Layout.parse(segment.layouts[w]) for name, w in named if w in segment.layouts}
    form = op.bind(call.form, call.sizes, layouts)
    return lambda lines: form(lines, *tensors)
