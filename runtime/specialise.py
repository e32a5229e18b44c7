"""What a program becomes on the CPU that runs it: kernels without torch's dispatcher, weights as they came.

A dense layer whose weight loses nothing as bfloat16 runs from that: half the memory to read in every step.
"""

from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from hemiola.plugins import jit, on_cpu

aten = torch.ops.aten
SMALL = 1 << 14  # numbers of a weight that is not worth the trouble


class Dense(NamedTuple):
    """A call of a dense layer."""

    x: Node
    weight: Node
    bias: Node | None
    turned: bool  # the weight is [F, O], not [O, F]


def specialise(
    module: GraphModule,
    names: tuple[str, ...],
    weights: dict[str, torch.Tensor],
    packs: dict[str, torch.Tensor],
) -> list[torch.Tensor]:
    """Rewrite the program whose first inputs are the weights `names`. Returns what to bind to them.

    `packs` keeps packed weights by name, for programs that share them.
    """
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"][: len(names)]
    held = dict(zip(inputs, names, strict=True))
    for node in list(graph.nodes):
        node.target = on_cpu.get(node.target, node.target)
        dense = _dense(node)
        if jit.AVAILABLE and dense is not None and dense.weight in held:
            _pack(module, node, dense, held[dense.weight], weights, packs)
    module.recompile()
    return [weights[name] if node.users else torch.empty(0) for node, name in held.items()]


def _dense(node: Node) -> Dense | None:
    match node.target, node.args:
        case aten.mm.default, (Node() as x, Node() as weight):
            return Dense(x, weight, None, True)
        case aten.addmm.default, (Node() as bias, Node() as x, Node() as weight):
            return Dense(x, weight, bias, True)
        case aten.linear.default, (Node() as x, Node() as weight):
            return Dense(x, weight, None, False)
        case aten.linear.default, (Node() as x, Node() as weight, Node() as bias):
            return Dense(x, weight, bias, False)
    return None


def _pack(
    module: GraphModule,
    node: Node,
    dense: Dense,
    name: str,
    weights: dict[str, torch.Tensor],
    packs: dict[str, torch.Tensor],
) -> None:
    from hemiola.plugins.linear.compiled import pack, product

    weight = weights[name] if dense.turned else weights[name].mT
    if weight.numel() < SMALL:
        return
    if name not in packs:
        packed = pack(weight)
        if packed is None:
            return
        packs[name] = packed
    where = f"packed_{node.name}"
    module.register_buffer(where, packs[name], persistent=False)
    with module.graph.inserting_before(node):
        held = module.graph.get_attr(where)
    node.target, node.args = product, (dense.x, held, dense.bias, weight.shape[1])
