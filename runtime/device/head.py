"""A program without its output head, and the head: steps ask for logits, or no more than the best tokens."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node


class Best(NamedTuple):
    """Of each line that chooses: its highest logit, and the lowest token that has it.

    The logit is infinite where one is NaN.
    """

    logit: torch.Tensor  # [L] fp32
    token_id: torch.Tensor  # [L] int64


class Head(NamedTuple):
    """From lines of hidden states [L, F]."""

    logits: Callable[[torch.Tensor], torch.Tensor]  # [L, V] fp32
    best: Callable[[torch.Tensor], Best]


def cut_head(program: GraphModule, bound: list[torch.Tensor]) -> Head | None:
    """Change a program, bound to its forms: its results become the lines that choose, and hidden states.

    bound: its weights and states. None: it has nothing but logits.
    """
    graph = program.graph
    nodes = list(graph.nodes)
    logits, hidden, *best = nodes[-1].args[0]
    if not best:
        return None
    given = dict(zip(nodes, bound, strict=False))
    widened = isinstance(logits, Node) and logits.target is torch.ops.aten.to.dtype
    layer: Any = logits.args[0] if widened else logits
    choice = best[0].args[0]
    lines = layer.args[0]
    assert lines is choice.args[0], "logits and the best of them are those of the same lines"
    compute, choose = _head(layer, given), _head(choice, given)
    nodes[-1].args = ((lines, hidden),)
    for node in (*best, choice, *([logits] if widened else []), layer):
        graph.erase_node(node)
    program.recompile()
    return Head(lambda x: compute(x).float(), lambda x: Best(*choose(x)))


def _head(node: Node, given: Mapping[Node, torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    """A call of a form with the weights that it has in the program."""
    form, weights = node.target, [given[argument] for argument in node.args[1:]]  # type: ignore[index]
    assert callable(form)
    return lambda lines: form(lines, *weights)
