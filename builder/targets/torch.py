"""The default target: a segment is the exported program itself; every node of ours runs in a chosen form."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.fx import Node

from hemiola.builder.graph import Graph
from hemiola.builder.lazy import Lazy
from hemiola.plugins import OPS
from hemiola.plugins.groups import Layout, WeightGroup
from hemiola.plugins.spec import Op, Pack, Unsupported
from hemiola.runtime.device.program import store
from hemiola.runtime.errors import Name, Refused
from hemiola.runtime.manifest import Limits, OpNode, Profile, SegmentPiece
from hemiola.runtime.progress import Report, silent


class Job(NamedTuple):
    """What targets must know besides a segment."""

    folder: Path  # of the engine
    device: str  # cpu | cuda
    archs: tuple[str, ...]
    limits: Limits
    report: Report = silent


class CompiledSegment(NamedTuple):
    """A segment in the engine directory; the fields are those of the manifest's Segment."""

    nodes: tuple[OpNode, ...]
    weights: dict[str, Lazy]  # in the layouts that the forms asked for
    file: str = ""
    pieces: tuple[SegmentPiece, ...] = ()
    outputs: tuple[str, ...] = ()
    compiler: str = ""
    profiles: tuple[Profile, ...] = ()


def compile(graph: Graph, weights: dict[str, Lazy], job: Job) -> CompiledSegment:
    """Choose a form for every node, pack what it asks for, and store the program without weights."""
    nodes, packed = choose_forms(graph, weights, job.device)
    file = f"{graph.name}.jsonl"
    store(graph.program.graph, job.folder / file)
    return CompiledSegment(nodes, packed, file)


def choose_forms(
    graph: Graph, weights: dict[str, Lazy], device: str, is_ours: Callable[[Op], bool] = lambda op: True
) -> tuple[tuple[OpNode, ...], dict[str, Lazy]]:
    """The nodes that are ours with their forms, and the weights in the layouts that these ask for."""
    inputs = [node for node in graph.program.graph.nodes if node.op == "placeholder"]
    names = dict(zip(inputs, graph.weights, strict=False))
    plain = {name: _cast(node.meta["val"].dtype) for node, name in names.items()}
    packs: dict[str, Pack] = {}
    nodes = []
    for node in graph.program.graph.nodes:
        op = op_of(node)
        if op is None or not is_ours(op):
            continue
        call = op.call(*(value.meta["val"] if isinstance(value, Node) else value for value in node.args))
        call = call._replace(layouts=_layouts(op, node, names, weights))
        try:
            form, refused = op.choose(call, device)
        except Unsupported as error:
            other = Name(error.option) if error.option else "checkpoint"
            said, way_out = f"{graph.name}, {node.name}: {error}", ("use another ", other)
            raise Refused("unsupported", error.option, said=said, way_out=way_out) from None
        sizes = tuple(call.sizes[letter] for letter in form.sizes)
        nodes.append(OpNode(op=op.name, form=form.name, refused=refused, sizes=sizes))
        for arg, value in zip(op.args, node.args, strict=False):
            if isinstance(value, Node) and value in names:
                name = names[value]
                pack = form.packs.get(arg.name, plain[name])
                other = packs.setdefault(name, pack)
                assert other is pack, f"{name} is wanted in two layouts"
    packed = {name: weights[name].packed(packs.get(name, plain[name])) for name in graph.weights}
    return tuple(nodes), packed


def _layouts(op: Op, node: Node, names: dict[Node, str], weights: dict[str, Lazy]) -> dict[str, Layout]:
    """Of a call's quantised weights, by argument."""
    given = {arg.name: weights[names[v]] for arg, v in zip(op.args, node.args, strict=False) if v in names}
    return {name: lazy.layout for name, lazy in given.items() if lazy.layout is not None}


def op_of(node: Node) -> Op | None:
    """The op of ours that a node calls."""
    packet = getattr(node.target, "_overloadpacket", None)
    op = OPS.get(packet.__name__) if packet is not None else None
    return op if op is not None and node.target is op.torch_op else None


def _cast(dtype: torch.dtype) -> Pack:
    """The layout of what no form packs: as it is, in the dtype that the graph was traced with."""

    def cast(weight: torch.Tensor | WeightGroup) -> torch.Tensor:
        assert isinstance(weight, torch.Tensor), "a form takes a quantised weight that it does not pack"
        return weight.to(dtype)

    return cast
