"""Fewer calls in engines for CPUs: a dense layer adds its outputs to what a sum behind it would add."""

from typing import Any, NamedTuple, TypeGuard

import torch
from torch.fx import Graph, Node

from hemiola.plugins import OPS


class LayerSum(NamedTuple):
    """A dense layer whose outputs are used once, in a sum."""

    layer: Node
    residual: Node


def find_sum(node: Node) -> LayerSum | None:
    """The later one of two layers, if both are."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return None
    for layer, other in (node.args[::-1], node.args):
        if is_layer(layer) and isinstance(other, Node) and _shape(layer) == _shape(other):
            return LayerSum(layer, other)
    return None


def add_sums(graph: Graph) -> None:
    """Change the graph: `layer + other` becomes the layer with `other` as its residual."""
    for node in list(graph.nodes):
        found = find_sum(node)
        if found is None:
            continue
        with graph.inserting_before(node):
            layer = graph.call_function(OPS["linear"].torch_op, (*found.layer.args, found.residual))
        layer.meta = node.meta.copy()
        node.replace_all_uses_with(layer)
        graph.erase_node(node)
        graph.erase_node(found.layer)


def is_layer(node: Any) -> TypeGuard[Node]:
    """A dense layer whose outputs are used once, and that adds nothing yet."""
    linear = OPS["linear"]
    is_linear = (
        isinstance(node, Node) and node.target is linear.torch_op and len(node.args) == len(linear.args)
    )
    return is_linear and len(node.users) == 1


def _shape(node: Node) -> torch.Size:
    return node.meta["val"].shape
