"""Fewer launches in engines for GPUs: a dense layer and what follows it as one call (plugins/fused_linear).

What lay between is no longer rounded, whatever the number of tokens: a call is fused for all steps.
"""

from typing import Any, NamedTuple

import torch
from torch.fx import Graph as Calls
from torch.fx import Node

from hemiola.builder.graph import Graph
from hemiola.builder.lazy import Lazy
from hemiola.builder.passes.sums import find_sum, is_layer
from hemiola.plugins import OPS
from hemiola.plugins.fused_linear.reference import EIGHT
from hemiola.plugins.fused_linear.spec import by_eights

aten = torch.ops.aten


class _End(NamedTuple):
    """How a dense layer's outputs end in one node, and are used for nothing else."""

    layer: Node
    between: tuple[Node, ...]  # from the layer to the end, neither included, the last first
    residual: Node | None
    activation: str


def fuse(graph: Graph, weights: dict[str, Lazy]) -> dict[str, Lazy]:
    """Change the graph; returns its weights in the order that the fused calls read."""
    program = graph.program.graph
    places = [node for node in program.nodes if node.op == "placeholder"]
    names = dict(zip(places, graph.weights, strict=False))
    absent = next(node for node, name in names.items() if name == "absent")
    for node in list(program.nodes):
        if _joined(program, node):
            continue
        end = _sum(node) or _swiglu(node) or _relu2(node)
        if end is None:
            continue
        x, weight, bias = end.layer.args
        assert isinstance(weight, Node)
        is_whole = len(weight.users) == 1 and weight.meta["val"].shape[0] % (2 * EIGHT) == 0
        if end.activation == "swiglu" and not (is_whole and bias is absent):
            continue
        residual, width = end.residual or absent, node.meta["val"].shape[1]
        with program.inserting_before(node):
            args = (x, weight, bias, residual, end.activation, width)
            fused = program.call_function(OPS["fused_linear"].torch_op, args)
        fused.meta = node.meta.copy()
        node.replace_all_uses_with(fused)
        for old in (node, *end.between, end.layer):
            program.erase_node(old)
    graph.program.graph_module.recompile()
    return ordered(graph, weights)


def ordered(graph: Graph, weights: dict[str, Lazy]) -> dict[str, Lazy]:
    """Any rank's weights in the order that fused calls read."""
    program, found = graph.program.graph, weights.copy()
    places = [node for node in program.nodes if node.op == "placeholder"]
    names = dict(zip(places, graph.weights, strict=False))
    for node in program.nodes:
        if node.target is OPS["fused_linear"].torch_op and node.args[4] == "swiglu":
            name = names[node.args[1]]
            found[name] = found[name].take(by_eights)
    return found


def _joined(program: Calls, node: Node) -> bool:
    """Whether it added something to the sum over all ranks, which now does that itself."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    pairs: Any = (node.args[::-1], node.args)
    for found, other in pairs:
        is_sum = isinstance(found, Node) and found.target is OPS["sum"].torch_op and len(found.args) == 2
        if is_sum and isinstance(other, Node) and len(found.users) == 1 and _is_like(found, other):
            with program.inserting_before(node):
                joined = program.call_function(OPS["sum"].torch_op, (*found.args, other))
            joined.meta = node.meta.copy()
            node.replace_all_uses_with(joined)
            program.erase_node(node)
            program.erase_node(found)
            return True
    return False


def _is_like(one: Node, other: Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return a.shape == b.shape and a.dtype == b.dtype


def _sum(node: Node) -> _End | None:
    found = find_sum(node)
    return _End(found.layer, (), found.residual, "none") if found is not None else None


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
    return _End(layer, (values, gates, chunk), None, "swiglu") if is_layer(layer) else None


def _relu2(node: Node) -> _End | None:
    """relu(layer) * relu(layer)."""
    if node.target is not aten.mul.Tensor or node.args[0] is not node.args[1]:
        return None
    relu: Any = node.args[0]
    if not isinstance(relu, Node) or relu.target is not aten.relu.default or len(relu.users) != 1:
        return None
    layer = relu.args[0]
    return _End(layer, (relu,), None, "relu2") if is_layer(layer) else None
