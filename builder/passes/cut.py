"""Cuts an ONNX graph at the nodes that are ours: dense parts for a compiler, and our ops between them.

A node's level is the longest way from the inputs to it, counted in nodes of ours. Dense nodes of one level
are one part; it comes before our nodes of that level. Parts hold no weights and no names, so that layers of
the same shapes have the same part, known by its content. Views that only our ops read are the runtime's.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, numpy_helper

from hemiola.plugins import OPS
from hemiola.plugins.onnx import DOMAIN
from hemiola.runtime.manifest_parts import SegmentPiece

Named = TypeVar("Named", ValueInfoProto, TensorProto)
VIEWS = {"Reshape": "view", "Split": "split", "Unsqueeze": "unsqueeze"}


class Partition(NamedTuple):
    """Pieces in the order in which they run; those of kind "part" name one of `parts`."""

    pieces: tuple[SegmentPiece, ...]
    parts: dict[str, onnx.ModelProto]  # by content


def cut(model: onnx.ModelProto, weights: Iterable[str]) -> Partition:
    """Every node of the graph, once."""
    graph, is_weight = model.graph, frozenset(weights)
    levels = _levels(graph.node)
    views = _trailing_views(graph)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    pieces: list[SegmentPiece] = []
    parts: dict[str, onnx.ModelProto] = {}
    for level in range(max(levels) + 1):
        at_level = [i for i, node_level in enumerate(levels) if node_level == level]
        dense = [i for i in at_level if i not in views and graph.node[i].domain != DOMAIN]
        if dense:
            piece, part = _part(model, dense, constants, is_weight)
            parts[piece.name] = part
            pieces.append(piece)
        pieces += [_view(graph.node[i], constants) for i in at_level if i in views]
        pieces += [_op(graph.node[i]) for i in at_level if graph.node[i].domain == DOMAIN]
    return Partition(tuple(pieces), parts)


def _levels(nodes: Sequence[NodeProto]) -> list[int]:
    """Nodes that one op became (their names begin alike) have one level: what is between stays inside."""
    ops = [node.name.rsplit(".", 1)[0] for node in nodes]
    level: dict[str, int] = {}  # by op
    behind: dict[str, tuple[str, int]] = {}  # by value, who makes it, and 1 if that is a node of ours
    for node, op in zip(nodes, ops, strict=True):
        made = [behind[name] for name in node.input if name in behind]
        level[op] = max([level.get(op, 0), *(level[maker] + step for maker, step in made)])
        behind |= dict.fromkeys(node.output, (op, int(node.domain == DOMAIN)))
    return [level[op] for op in ops]


def _trailing_views(graph: onnx.GraphProto) -> set[int]:
    """Nodes that move no number, for ops of ours alone, which read strided tensors."""
    kept = {value.name for value in graph.output}  # values that something dense needs, or who calls us
    views: set[int] = set()
    for i in reversed(range(len(graph.node))):
        node = graph.node[i]
        if node.op_type in VIEWS and not kept & set(node.output):
            views.add(i)
        elif node.domain != DOMAIN:
            kept |= set(node.input)
    return views


def _part(
    model: onnx.ModelProto, chosen: list[int], constants: dict[str, TensorProto], weights: frozenset[str]
) -> tuple[SegmentPiece, onnx.ModelProto]:
    """The nodes as a graph of their own, with names by position, and the piece that calls it."""
    nodes = [model.graph.node[i] for i in chosen]
    made = {name for node in nodes for name in node.output}
    read = dict.fromkeys(name for node in nodes for name in node.input if name not in made)
    inputs = [name for name in read if name not in constants]
    inside = set(chosen)
    wanted = {value.name for value in model.graph.output}
    wanted |= {name for i, node in enumerate(model.graph.node) if i not in inside for name in node.input}
    outputs = [name for node in nodes for name in node.output if name in wanted]

    names: dict[str, str] = {}
    for name in inputs:
        kind = "w" if name in weights else "x"
        names[name] = f"{kind}{sum(known.startswith(kind) for known in names.values())}"
    names |= {name: f"c{i}" for i, name in enumerate(n for n in read if n in constants)}
    names |= {name: f"y{i}" for i, name in enumerate(outputs)}
    inner = (name for node in nodes for name in node.output if name not in names)
    names |= {name: f"v{i}" for i, name in enumerate(inner)}

    infos = {
        v.name: v
        for v in (*model.graph.input, *model.graph.output, *model.graph.value_info)
        if v.name in names
    }
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=[model.opset_import[0]])
    part.graph.name = "part"
    part.graph.input.extend(_renamed(infos[name], names[name]) for name in inputs)
    part.graph.output.extend(_renamed(infos[name], names[name]) for name in outputs)
    part.graph.initializer.extend(_renamed(constants[n], names[n]) for n in read if n in constants)
    for node in nodes:
        copy = part.graph.node.add()
        copy.CopyFrom(node)
        copy.name = ""
        copy.input[:] = [names[name] for name in node.input]
        copy.output[:] = [names[name] for name in node.output]
    digest = hashlib.sha256(part.SerializeToString(deterministic=True)).hexdigest()[:16]
    return SegmentPiece(kind="part", name=digest, inputs=tuple(inputs), outputs=tuple(outputs)), part


def _renamed(item: Named, name: str) -> Named:
    copy = type(item)()
    copy.CopyFrom(item)
    copy.name = name
    return copy


def _view(node: NodeProto, constants: dict[str, TensorProto]) -> SegmentPiece:
    numbers = tuple(numpy_helper.to_array(constants[node.input[1]]).tolist())
    if node.op_type == "Split":
        numbers = (*numbers, onnx.helper.get_node_attr_value(node, "axis"))
    return SegmentPiece(
        kind="view",
        name=VIEWS[node.op_type],
        inputs=(node.input[0],),
        outputs=tuple(node.output),
        constants=numbers,
    )


def _op(node: NodeProto) -> SegmentPiece:
    """What it updates in place comes out of the ONNX node, but not of the op."""
    op = OPS[node.op_type]
    attributes = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
    values = (attributes[attr.name] for attr in op.attrs)
    texts = (value.decode() if isinstance(value, bytes) else value for value in values)
    return SegmentPiece(
        kind="op",
        name=op.name,
        inputs=tuple(node.input),
        outputs=tuple(node.output[: len(op.results)]),
        constants=tuple(attr.type(value) for attr, value in zip(op.attrs, texts, strict=True)),
    )
