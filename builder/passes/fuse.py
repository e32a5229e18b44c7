"""Fewer calls: a dense layer and what follows it as one call, another ending of the layer (plugins/linear).

What lay between is no longer rounded, whatever the number of tokens: a call is fused for all steps.
"""

from typing import Any, NamedTuple, TypeGuard

import torch
from torch.fx import Graph as Calls
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
    program = graph.program.graph
    for node in list(program.nodes):
        if _joined(program, node, device):
            continue
        end = _sum(node) or _swiglu(node) or _relu2(node)
        if end is None or not OPS[end.op].runs_on(device):
            continue
        _, weight, bias = end.layer.args
        assert isinstance(weight, Node) and isinstance(bias, Node)
        is_whole = len(weight.users) == 1 and weight.meta["val"].shape[0] % (2 * EIGHT) == 0
        if end.ending == "swiglu" and not (is_whole and bias.meta["val"].numel() == 0):
            continue
        with program.inserting_before(node):
            fused = program.call_function(OPS[end.op].torch_op, (*end.layer.args, *end.residual))
        fused.meta = node.meta.copy()
        node.replace_all_uses_with(fused)
        for old in (node, *end.between, end.layer):
            program.erase_node(old)
    graph.program.graph_module.recompile()
    return ordered(graph, weights)


def ordered(graph: Graph, weights: dict[str, Lazy]) -> dict[str, Lazy]:
    """Any rank's weights in the order that fused calls read."""
    in_order = weights.copy()
    names = dict(zip(graph.placeholders(), graph.weights, strict=False))
    for node in graph.program.graph.nodes:
        if node.target is OPS["linear_swiglu"].torch_op:
            name = names[node.args[1]]
            in_order[name] = in_order[name].take(by_eights)
    return in_order


def _joined(program: Calls, node: Node, device: str) -> bool:
    """Whether it added something to the sum over all ranks, which now does that itself, on GPUs."""
    if device != "cuda" or node.target is not aten.add.Tensor or node.kwargs:
        return False
    pairs: Any = (node.args[::-1], node.args)
    for total, other in pairs:
        is_sum = isinstance(total, Node) and total.target is OPS["sum"].torch_op and len(total.args) == 2
        if is_sum and isinstance(other, Node) and len(total.users) == 1 and _is_like(total, other):
            with program.inserting_before(node):
                joined = program.call_function(OPS["sum"].torch_op, (*total.args, other))
            joined.meta = node.meta.copy()
            node.replace_all_uses_with(joined)
            program.erase_node(node)
            program.erase_node(total)
            return True
    return False


def _is_like(one: Node, other: Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return a.shape == b.shape and a.dtype == b.dtype


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
