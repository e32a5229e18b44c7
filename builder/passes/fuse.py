"""Fewer calls: a dense layer and what follows it as one call, another ending of the layer (plugins/linear).

What lay between is no longer rounded, whatever the number of tokens: a call is fused for all steps.
"""

from typing import Any, NamedTuple, TypeGuard

import torch
from torch.fx import Node

from hemiola.builder.graph import Graph
from hemiola.builder.lazy import Lazy
from hemiola.plugins import OPS
from hemiola.plugins.linear.reference import EIGHT
from hemiola.plugins.linear.spec import by_eights

LINEAR = OPS["linear"]
aten = torch.ops.aten


class _End(NamedTuple):
    """How a dense layer's outputs end in one node, and are used for nothing else."""

    layer: Node
    between: tuple[Node, ...]  # from the layer to the end, neither included, the last first
    residual: tuple[Node, ...] = ()  # what is added
    ending: str = ""

    @property
    def op(self) -> str:
        return f"{LINEAR.name}_{self.ending}" if self.ending else LINEAR.name


def fuse(graph: Graph, weights: dict[str, Lazy], device: str) -> dict[str, Lazy]:
    """Change the graph, by what the device has forms for; returns its weights in the order that the fused
    calls read."""
    program, found = graph.program.graph, weights.copy()
    names = dict(zip(graph.placeholders(), graph.weights, strict=False))
    for node in list(program.nodes):
        end = _sum(node) or _swiglu(node) or _relu2(node)
        if end is None or not OPS[end.op].runs_on(device):
            continue
        _, weight, bias = end.layer.args
        assert isinstance(weight, Node) and isinstance(bias, Node)
        if end.ending == "swiglu":
            if len(weight.users) > 1 or weight.meta["val"].shape[0] % (2 * EIGHT) or bias.meta["val"].numel():
                continue
            found[names[weight]] = found[names[weight]].take(by_eights)
        with program.inserting_before(node):
            fused = program.call_function(OPS[end.op].torch_op, (*end.layer.args, *end.residual))
        fused.meta = node.meta.copy()
        node.replace_all_uses_with(fused)
        for old in (node, *end.between, end.layer):
            program.erase_node(old)
    graph.program.graph_module.recompile()
    return found


def _sum(node: Node) -> _End | None:
    """layer + residual; of two layers the later one."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    for layer, other in (node.args[::-1], node.args):
        if _is_layer(layer) and isinstance(other, Node) and _shape(layer) == _shape(other):
            return _End(layer, (), (other,))
    return None


def _swiglu(node: Node) -> _End | None:
    """gate(values, gates, "silu"), the two halves of a layer's outputs."""
    if node.target is not OPS["gate"].torch_op or node.args[2] != "silu":
        return None
    values, gates, _ = node.args
    if not (isinstance(values, Node) and isinstance(gates, Node)):
        return None
    chunk: Any = gates.args[0]
    is_half = isinstance(chunk, Node) and chunk.target is aten.chunk.default and chunk.args[1:] == (2, 1)
    pairs = [(part.args, list(part.users)) for part in (gates, values)]
    if not is_half or pairs != [((chunk, 0), [node]), ((chunk, 1), [node])] or len(chunk.users) != 2:
        return None
    layer = chunk.args[0]
    return _End(layer, (values, gates, chunk), ending="swiglu") if _is_layer(layer) else None


def _relu2(node: Node) -> _End | None:
    """relu(layer) * relu(layer)."""
    if node.target is not aten.mul.Tensor or node.args[0] is not node.args[1]:
        return None
    relu: Any = node.args[0]
    if not isinstance(relu, Node) or relu.target is not aten.relu.default or len(relu.users) != 1:
        return None
    layer = relu.args[0]
    return _End(layer, (relu,), ending="relu2") if _is_layer(layer) else None


def _is_layer(node: Any) -> TypeGuard[Node]:
    """A dense layer whose outputs are used once, and that adds nothing yet."""
    is_plain = (
        isinstance(node, Node) and node.target is LINEAR.torch_op and len(node.args) == len(LINEAR.args)
    )
    return is_plain and len(node.users) == 1


def _shape(node: Node) -> torch.Size:
    return node.meta["val"].shape
