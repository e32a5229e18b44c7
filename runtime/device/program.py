"""An engine's program as a file: its calls, one a line. To read it takes nothing of torch.export's."""

import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from hemiola.runtime.arch import name_of
from hemiola.runtime.errors import Refused

OPERATOR = "operator"


def store(graph: Graph, path: Path) -> None:
    path.write_text("\n".join(_lines(graph)))


def _lines(graph: Graph) -> Iterator[str]:
    """Name, function ("" for an input), arguments; of a tensor dtype and sizes, null where they are free."""
    for node in graph.nodes:
        value = node.meta.get("val")
        line = [node.name, _called(node), _written(node.args)]
        if isinstance(value, torch.Tensor):
            sizes = [size if isinstance(size, int) else None for size in value.shape]
            line += [_written(value.dtype), sizes]
        assert not node.kwargs, f"{node.format_node()} has arguments by name"
        yield json.dumps(line)


def _called(node: Node) -> str:
    if node.op != "call_function":
        return "" if node.op == "placeholder" else node.op
    own = isinstance(node.target, torch._ops.OpOverload)
    return str(node.target) if own else f"{OPERATOR}.{node.target.__name__}"  # type: ignore[union-attr]


def _written(value: Any) -> Any:
    match value:
        case Node():
            return {"node": value.name}
        case torch.dtype():
            return {"dtype": name_of(value)}
        case list() | tuple():
            return [_written(part) for part in value]
    assert value is None or isinstance(value, (bool, int, float, str)), f"{value!r} has no place in a file"
    return value


def load_program(path: Path) -> GraphModule:
    """A module that takes weights, states and inputs flat. The tensors of its nodes have no memory."""
    graph, nodes = Graph(), {}
    try:
        for name, called, args, *value in map(json.loads, path.read_text().splitlines()):
            node = nodes[name] = _node(graph, name, called, _read(args, nodes))
            if value:
                dtype, sizes = _read(value, nodes)
                sizes = [size or 0 for size in sizes]
                node.meta["val"] = torch.empty(sizes, dtype=dtype, device="meta")
        return GraphModule(torch.nn.Module(), graph)
    except Exception as error:
        raise Refused(
            f"{path} cannot be loaded ({type(error).__name__}: {error}); run build-engine again"
        ) from error


def _node(graph: Graph, name: str, called: str, args: list[Any]) -> Node:
    if not called:
        return graph.placeholder(name)
    if called == "output":
        return graph.output(tuple(args[0]))
    space, *path = called.split(".")
    target: Any = operator if space == OPERATOR else getattr(torch.ops, space)
    for part in path:
        target = getattr(target, part)
    return graph.create_node("call_function", target, tuple(args), name=name)


def _read(value: Any, nodes: dict[str, Node]) -> Any:
    match value:
        case {"node": name}:
            return nodes[name]
        case {"dtype": name}:
            return getattr(torch, name)
        case list():
            return [_read(part, nodes) for part in value]
    return value
