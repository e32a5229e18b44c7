"""What a program becomes on the CPU that runs it: kernels without torch's dispatcher, weights as they came.

A dense layer whose weight loses nothing as bfloat16 runs from that: half the memory to read in every step.
"""

from typing import NamedTuple, TypeGuard

import torch
from torch.fx import GraphModule, Node

from hemiola.plugins import jit, on_cpu

aten, ours = torch.ops.aten, torch.ops.hemiola
SMALL = 1 << 14  # numbers of a weight that is not worth the trouble


class Dense(NamedTuple):
    """A call of a dense layer."""

    x: Node
    weight: Node
    bias: Node | None
    turned: bool  # the weight is [F, O], not [O, F]
    exact: bool


def specialise(
    module: GraphModule,
    names: tuple[str, ...],
    weights: dict[str, torch.Tensor],
    packs: dict[str, torch.Tensor],
) -> list[torch.Tensor]:
    """Rewrite the program whose first inputs are the weights `names`. Returns what to bind to them.

    `packs` keeps what was packed, for programs that share weights.
    """
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"][: len(names)]
    held = dict(zip(inputs, names, strict=True))
    for node in list(graph.nodes):
        dense = _dense(node)
        if jit.AVAILABLE and dense is not None and dense.weight in held:
            _pack(module, node, dense, held, weights, packs)
        node.target = on_cpu.get(node.target, node.target)
    module.recompile()
    return [weights[name] if node.users else torch.empty(0) for node, name in held.items()]


def _dense(node: Node) -> Dense | None:
    if node.kwargs:
        return None
    match node.target, node.args:
        case aten.mm.default, (Node() as x, Node() as weight):
            return Dense(x, weight, None, True, False)
        case aten.addmm.default, (Node() as bias, Node() as x, Node() as weight):
            return Dense(x, weight, bias, True, False)
        case aten.linear.default, (Node() as x, Node() as weight):
            return Dense(x, weight, None, False, False)
        case aten.linear.default, (Node() as x, Node() as weight, Node() as bias):
            return Dense(x, weight, bias, False, False)
        case ours.linear.default, (Node() as x, Node() as weight, Node() as bias):
            return Dense(x, weight, bias, False, True)
    return None


def _pack(
    module: GraphModule,
    node: Node,
    dense: Dense,
    held: dict[Node, str],
    weights: dict[str, torch.Tensor],
    packs: dict[str, torch.Tensor],
) -> None:
    from hemiola.plugins.linear.compiled import pack, product

    name, bias = held[dense.weight], dense.bias
    weight = weights[name] if dense.turned else weights[name].mT
    if weight.numel() < SMALL or not _is_fp32(dense.x.meta.get("val"), 2):
        return
    if bias is not None:
        value = weights[held[bias]] if bias in held else None
        if value is not None and value.numel() == 0:  # the exact op's word for none
            bias = None
        elif not _is_fp32(value, 1) or value.shape[0] != weight.shape[1] or not value.is_contiguous():
            return
    key = f"{name} {dense.turned}"
    if key not in packs:
        strips = pack(weight)
        if strips is None:
            return
        packs[key] = strips
    where = f"packed_{node.name}"
    module.register_buffer(where, packs[key], persistent=False)
    with module.graph.inserting_before(node):
        packed = module.graph.get_attr(where)
    node.target, node.args = product, (dense.x, packed, bias, weight.shape[1], dense.exact)


def _is_fp32(value: torch.Tensor | None, dim: int) -> TypeGuard[torch.Tensor]:
    return value is not None and value.dtype == torch.float32 and value.dim() == dim
