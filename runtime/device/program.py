"""An engine's program as a file: its calls, one a line. To read it takes nothing of torch.export's.

A file may come from a stranger: names, calls and arguments are checked here, shapes in `checked.py`.
"""

import json
import operator
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from hemiola.plugins import OPS
from hemiola.plugins.groups import Layout
from hemiola.runtime.arch import name_of
from hemiola.runtime.errors import Refused, one_line, shown
from hemiola.runtime.json_file import parse_json
from hemiola.runtime.manifest_parts import Segment
from hemiola.runtime.outline import MOST_LINES

OPERATOR = "operator"
aten = torch.ops.aten
# What torch may compute between our ops: it moves numbers, or rounds each element once.
MOVES = (
    aten.cat.default, aten.chunk.default, aten.index_select.default, aten.split.Tensor,
    aten.split_with_sizes.default, aten.unsqueeze.default, aten.view.default,
)  # fmt: skip
EXACT = (*MOVES, aten.add.Tensor, aten.mul.Tensor, aten.relu.default, aten.to.dtype)
# By name, all that a program may call.
OURS = {op.torch_op: op for op in OPS.values()}
CALLS = {str(op.torch_op): op.torch_op for op in OPS.values()}
CALLS |= {str(function): function for function in EXACT} | {f"{OPERATOR}.getitem": operator.getitem}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
DTYPES = {name_of(dtype): dtype for dtype in (*FLOATS, torch.uint8, torch.int32, torch.int64)}
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,199}")
MOST_BYTES = 2**23  # of a program; one of 100 layers has less than 2**20
MAX_DIMS = 8
MOST_SIZE = 2**31 - 1


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
    is_overload = isinstance(node.target, torch._ops.OpOverload)
    return str(node.target) if is_overload else f"{OPERATOR}.{node.target.__name__}"  # type: ignore[union-attr]


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
    lines = _text(path).splitlines()
    if len(lines) > MOST_LINES:
        message = f"{path} has {len(lines)} lines, a program at most {MOST_LINES}"
        raise Refused("damaged", message=message, way_out="run build-engine again")
    for number, text in enumerate(lines, 1):
        try:
            node = _node(graph, nodes, parse_json(text))
        except (ValueError, TypeError, RuntimeError) as error:  # of ours, and of torch about a size
            message = f"{path}, line {number}: {one_line(error)}"
            raise Refused("damaged", message=message, way_out="run build-engine again") from None
        nodes[node.name] = node
    if "output" not in nodes:
        message = f"{path} does not end with its output"
        raise Refused("damaged", message=message, way_out="run build-engine again")
    return GraphModule(torch.nn.Module(), graph)


def layouts_of(nodes: Sequence[Node], segment: Segment) -> dict[Node, dict[str, Layout]]:
    """Of the quantised weights of each call of ours, by argument. Raises ValueError for what is no layout."""
    layouts = {name: Layout.parse(text) for name, text in segment.layouts.items()}
    weights = dict(zip(nodes, segment.weights, strict=False))
    by_node = {}
    for node in nodes:
        op = OURS.get(node.target)
        given = zip(op.args, node.args, strict=False) if op is not None else ()
        pairs = [(arg.name, layouts.get(weights.get(value, ""))) for arg, value in given if value in weights]
        by_node[node] = {name: layout for name, layout in pairs if layout is not None}
    return by_node


def _text(path: Path) -> str:
    if path.stat().st_size > MOST_BYTES:
        message = f"{path} has {path.stat().st_size} bytes, a program at most {MOST_BYTES}"
        raise Refused("damaged", message=message, way_out="run build-engine again")
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        message = f"{path} cannot be loaded ({one_line(error)})"
        raise Refused("damaged", message=message, way_out="run build-engine again") from None


def _node(graph: Graph, nodes: dict[str, Node], line: Any) -> Node:
    """Raises ValueError that says what is wrong with a line."""
    if not isinstance(line, list) or len(line) not in (3, 5):
        raise ValueError(f"{shown(line)} is no list of a name, a call and its arguments")
    name, called, args, *value = line
    if "output" in nodes:
        raise ValueError(f"{shown(name)} stands behind the output")
    _check_name(name, nodes)
    if called == "output":
        return _output(graph, name, args, nodes)
    node = _input(graph, name, args, nodes) if called == "" else _call(graph, name, called, args, nodes)
    if node.name != name:  # torch.fx writes code, and gave it another name
        raise ValueError(f"{shown(name)} is no name of a value")
    if value:
        node.meta["val"] = _tensor(*value)
    return node


def _check_name(name: Any, nodes: dict[str, Node]) -> None:
    """torch.fx writes names into code of Python's as they are."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == "self":
        raise ValueError(f"{shown(name)} is no name of a value")
    if name in nodes:
        raise ValueError(f"{name!r} is the name of two values")


def _input(graph: Graph, name: str, args: Any, nodes: dict[str, Node]) -> Node:
    if args != []:
        raise ValueError(f"{name!r} is an input and has the arguments {shown(args)}")
    if nodes and next(reversed(nodes.values())).op != "placeholder":
        raise ValueError(f"{name!r} is an input behind a call")
    return graph.placeholder(name)


def _output(graph: Graph, name: str, args: Any, nodes: dict[str, Node]) -> Node:
    if name != "output":
        raise ValueError(f"{name!r} is the output under another name")
    match args:
        case [[*results]] if results:
            return graph.output(tuple(_value(result, nodes) for result in results))
    raise ValueError(f"{shown(args)} are no results")


def _call(graph: Graph, name: str, called: Any, args: Any, nodes: dict[str, Node]) -> Node:
    target = CALLS.get(called) if isinstance(called, str) else None
    if target is None:
        raise ValueError(f"{name!r} is {shown(called)}, which no program may call")
    if not isinstance(args, list):
        raise ValueError(f"{name!r} has {shown(args)}, expected a list of arguments")
    read = tuple(_read(a, nodes) for a in args)
    if target is operator.getitem and [*map(type, read)] != [Node, int]:  # torch.fx writes code for it
        raise ValueError(f"{name!r} takes {shown(args)}, which is no item of a value")
    return graph.create_node("call_function", target, read, name=name)


def _read(argument: Any, nodes: dict[str, Node]) -> Any:
    """A value, or a list of values."""
    if isinstance(argument, list):
        return [_value(part, nodes) for part in argument]
    return _value(argument, nodes)


def _value(value: Any, nodes: dict[str, Node]) -> Any:
    match value:
        case {"node": name, **rest} if not rest:
            if not isinstance(name, str) or name not in nodes:
                raise ValueError(f"{shown(name)} was not computed before")
            return nodes[name]
        case {"dtype": name, **rest} if not rest:
            return _dtype(name)
        case str() | bool() | None:
            return value
        case int() if abs(value) <= MOST_SIZE:
            return value
        case float() if value == value:  # no NaN
            return value
    raise ValueError(f"{shown(value)} is no argument")


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"{shown(name)} is no dtype of a program, which are {', '.join(DTYPES)}")
    return DTYPES[name]


def _tensor(dtype: Any, sizes: Any) -> torch.Tensor:
    match dtype:
        case {"dtype": name, **rest} if not rest:
            known = _dtype(name)
        case _:
            raise ValueError(f"{shown(dtype)} is no dtype")
    if not isinstance(sizes, list) or len(sizes) > MAX_DIMS or not all(map(_is_size, sizes)):
        raise ValueError(f"{shown(sizes)} are no sizes of a tensor")
    return torch.empty([size or 0 for size in sizes], dtype=known, device="meta")


def _is_size(size: Any) -> bool:
    return size is None or (type(size) is int and 0 <= size <= MOST_SIZE)
