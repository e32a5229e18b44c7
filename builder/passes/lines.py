"""A program that computes no line whose logits nobody asks for.

Behind the last op that looks at more than one token, every token is by itself, and only some have logits. So
these tokens are selected there, and not from the last result. If that op is attention, its other tokens only
write their keys and values. The bits of a line do not depend on its neighbours, so only the time changes: of
a prompt's last MLP, and of most of a drafting head that reads pairs without drafting.
"""

import operator

import torch
from torch.fx import Graph, Node

from hemiola.plugins import OPS

aten = torch.ops.aten
BY_LINE = {
    operator.getitem,
    *(op.torch_op for op in OPS.values() if op.by_line),
    *(aten.add.Tensor, aten.mul.Tensor, aten.relu.default, aten.chunk.default),
    *(aten.split.Tensor, aten.split_with_sizes.default),
}


def only_lines(graph: Graph, num_bound: int) -> None:
    """Change the graph so that its hidden states, too, are those of the lines that have logits: [L, F].

    num_bound: how many of its first inputs are weights and states.
    """
    nodes = list(graph.nodes)
    bound = set(nodes[:num_bound])
    _, hidden = nodes[-1].args[0]
    select = next(node for node in (hidden, *hidden.users) if node.target is aten.index_select.default)
    every, _, ids = select.args
    nodes[-1].replace_input_with(hidden, select)
    late = _late(nodes[: nodes.index(select)], {select, nodes[-1]}, bound)
    selected: dict[Node, Node] = {}
    for node in [node for node in nodes if node in late]:
        for source in [s for s in node.all_input_nodes if s not in late and s not in bound]:
            if source not in selected:
                with graph.inserting_before(node):
                    args = (source, 0, ids)
                    selected[source] = graph.call_function(aten.index_select.default, args)
            node.replace_input_with(source, selected[source])
    for source in selected:
        _attend_for(source, ids)
    if late:
        select.replace_all_uses_with(every)
        graph.erase_node(select)


def _attend_for(node: Node, ids: Node) -> None:
    """Attention of which nothing else is used is not computed for other tokens."""
    if node.target is aten.view.default and len(node.users) == 1:
        _attend_for(node.args[0], ids)  # type: ignore[arg-type]
    elif node.target is OPS["attention"].torch_op and len(node.users) == 1:
        node.args = (*node.args, ids)


def _late(nodes: list[Node], ends: set[Node], bound: set[Node]) -> set[Node]:
    """What is computed line by line, and wanted for nothing but these ends."""
    late: set[Node] = set()
    for node in reversed(nodes):
        if node.target in BY_LINE and node.users and all(user in late | ends for user in node.users):
            late.add(node)
    while early := {node for node in late if not _fits(node, late, ends, bound)}:
        late -= early
    return late


def _fits(node: Node, late: set[Node], ends: set[Node], bound: set[Node]) -> bool:
    """Whether all that uses it is late, and all else that it reads are lines."""
    sources = (source for source in node.all_input_nodes if source not in late and source not in bound)
    return all(user in late | ends for user in node.users) and all(map(_has_lines, sources))


def _has_lines(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.is_floating_point()
