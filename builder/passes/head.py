"""A program without its output head: a step asks for logits, or for no more than the best tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node


def layer_of_logits(graph: Graph) -> Node:
    """The call of ours that makes logits."""
    logits: Any = list(graph.nodes)[-1].args[0][0]
    widened = isinstance(logits, Node) and logits.target is torch.ops.aten.to.dtype
    layer: Any = logits.args[0] if widened else logits
    return layer


def cut_head(graph: Graph, weights: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Change a program that computes logits, hidden states and the best of the logits: its results become the
    lines that choose, and hidden states.

    Returns the weights of the two calls of ours that it no longer has, of logits and of the best. Empty: it
    computes no best, and is left as it is. `weights`: names of its first inputs.
    """
    nodes = list(graph.nodes)
    logits, hidden, *best = nodes[-1].args[0]
    if not best:
        return ()
    layer: Any = layer_of_logits(graph)
    choice: Any = best[0].args[0]
    lines = layer.args[0]
    assert lines is choice.args[0], "logits and the best of them are those of the same lines"
    names = dict(zip(nodes, weights, strict=False))
    nodes[-1].args = ((lines, hidden),)
    read = layer.args[1:], choice.args[1:]
    for node in (*best, choice, *([logits] if logits is not layer else []), layer):
        graph.erase_node(node)
    return tuple(tuple(names[weight] for weight in call) for call in read)
