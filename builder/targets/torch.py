"""The default target: a segment is the exported program itself; every node of ours runs in a chosen form."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import fx
from torch.fx import Node

from hemiola.builder.graph import Graph, op_of
from hemiola.builder.lazy import Lazy
from hemiola.builder.passes import copied
from hemiola.builder.passes.fuse import fuse
from hemiola.builder.passes.head import cut_head, layer_of_logits
from hemiola.builder.passes.lines import only_lines
from hemiola.plugins.groups import Layout, WeightGroup
from hemiola.plugins.spec import Form, Op, Pack, Unsupported
from hemiola.runtime.device.program import layouts_of, store
from hemiola.runtime.errors import Name, Refused
from hemiola.runtime.manifest_parts import HeadCall, OpNode, Profile, Segment, SegmentPiece
from hemiola.runtime.outline import Limits
from hemiola.runtime.progress import Report, silent


class Job(NamedTuple):
    """What targets must know besides a segment."""

    folder: Path  # of the engine
    device: str  # cpu | cuda
    archs: tuple[str, ...]
    limits: Limits
    report: Report = silent
    tp: int = 1


class CompiledSegment(NamedTuple):
    """A segment in the engine directory; the fields are those of the manifest's Segment."""

    nodes: tuple[OpNode, ...]
    weights: dict[str, Lazy]  # in the layouts that the forms asked for
    file: str = ""
    lines_file: str = ""
    head: tuple[HeadCall, ...] = ()
    scores: HeadCall | None = None
    pieces: tuple[SegmentPiece, ...] = ()
    outputs: tuple[str, ...] = ()
    compiler: str = ""
    profiles: tuple[Profile, ...] = ()


def compile(graph: Graph, weights: dict[str, Lazy], job: Job) -> CompiledSegment:
    """Choose a form for every node, pack what it asks for, and store the program without weights."""
    return _for_cpu(graph, weights, job) if job.device == "cpu" else _for_gpu(graph, weights, job)


def _for_cpu(graph: Graph, weights: dict[str, Lazy], job: Job) -> CompiledSegment:
    """A trunk has two programs, since only an MTP head reads hidden states of lines without logits."""
    fused = fuse(graph, weights, job.device)
    nodes, packed = choose_forms(graph, fused, job.device)
    lines = copied(graph.program.graph)
    only_lines(lines, len(graph.weights) + len(graph.states))
    if graph.name == "draft":
        return CompiledSegment(nodes, packed, _stored(lines, "draft", job))
    file = _stored(graph.program.graph, "trunk", job)
    scores = _scores(graph, nodes)
    return CompiledSegment(nodes, packed, file, _stored(lines, "trunk.lines", job), scores=scores)


def _for_gpu(graph: Graph, weights: dict[str, Lazy], job: Job) -> CompiledSegment:
    fused = fuse(graph, weights, job.device)
    nodes, packed = choose_forms(graph, fused, job.device)
    scores = _scores(graph, nodes) if graph.name == "trunk" else None
    program = copied(graph.program.graph)
    named = cut_head(program, graph.weights)
    body, calls = nodes[: len(nodes) - len(named)], nodes[len(nodes) - len(named) :]
    head = tuple(
        HeadCall(**call.model_dump(), weights=head_weights)
        for call, head_weights in zip(calls, named, strict=True)
    )
    return CompiledSegment(body, packed, _stored(program, graph.name, job), head=head, scores=scores)


def _scores(graph: Graph, nodes: tuple[OpNode, ...]) -> HeadCall:
    """The call that makes logits."""
    inputs = [node for node in graph.program.graph.nodes if node.op == "placeholder"]
    names, ours = dict(zip(inputs, graph.weights, strict=False)), filter(op_of, graph.program.graph.nodes)
    layer = layer_of_logits(graph.program.graph)
    call = nodes[list(ours).index(layer)]
    return HeadCall(**call.model_dump(), weights=tuple(names[weight] for weight in layer.args[1:]))


def _stored(program: fx.Graph, name: str, job: Job) -> str:
    """The file."""
    store(program, job.folder / f"{name}.jsonl")
    return f"{name}.jsonl"


def choose_forms(
    graph: Graph, weights: dict[str, Lazy], device: str, is_ours: Callable[[Op], bool] = lambda op: True
) -> tuple[tuple[OpNode, ...], dict[str, Lazy]]:
    """The nodes that are ours with their forms, and the weights in the layouts that these ask for."""
    inputs = [node for node in graph.program.graph.nodes if node.op == "placeholder"]
    names = dict(zip(inputs, graph.weights, strict=False))
    dtypes = {name: node.meta["val"].dtype for node, name in names.items()}
    packs: dict[str, Pack | None] = {}
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
            message, way_out = f"{graph.name}, {node.name}: {error}", ("use another ", other)
            raise Refused("unsupported", error.option, message=message, way_out=way_out) from None
        sizes = tuple(call.sizes[letter] for letter in form.sizes)
        nodes.append(OpNode(op=op.name, form=form.name, refused=refused, sizes=sizes))
        for arg, value in zip(op.args, node.args, strict=False):
            if isinstance(value, Node) and value in names:
                name = names[value]
                pack = form.packs.get(arg.name)
                other = packs.setdefault(name, pack)
                assert other is pack, f"{name} is wanted in two layouts"
    return tuple(nodes), {n: _laid_out(weights[n], packs.get(n), dtypes[n]) for n in graph.weights}


def _laid_out(weight: Lazy, pack: Pack | None, dtype: torch.dtype) -> Lazy:
    """What no form packs lies as it is, in the dtype that the graph was traced with."""
    return weight.cast(dtype) if pack is None else weight.packed(pack)


def _layouts(op: Op, node: Node, names: dict[Node, str], weights: dict[str, Lazy]) -> dict[str, Layout]:
    """Of a call's quantised weights, by argument."""
    given = {arg.name: weights[names[v]] for arg, v in zip(op.args, node.args, strict=False) if v in names}
    return {name: lazy.layout for name, lazy in given.items() if lazy.layout is not None}


def layouts_in(graph: Graph, segment: Segment) -> dict[Node, dict[str, Layout]]:
    """Of the quantised weights of each call of ours, by argument."""
    return layouts_of([*graph.program.graph.nodes], segment)


def packed_empty(form: Form, arg: str, layout: Layout, weight: torch.Tensor) -> torch.Tensor:
    """A quantised weight of this traced one's shape as the form takes it, without memory."""
    return form.packs[arg](WeightGroup.empty(layout, tuple(weight.shape)))
