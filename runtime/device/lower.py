"""An engine's program on a CPU: lowered once, when the engine is opened, to a step of compiled kernels.

Our ops write their calls down themselves (plugins/cpu/code.py); what torch computes between them becomes
views or kernels here. What is neither is refused by name.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from hemiola.plugins import OPS
from hemiola.plugins.cpu import moves
from hemiola.plugins.cpu.code import Recorder, View
from hemiola.plugins.cpu.steps import RecordedStep
from hemiola.plugins.groups import Layout
from hemiola.plugins.sizes import FreeSize
from hemiola.runtime.abi import INPUTS, OUTPUTS
from hemiola.runtime.device.program import OURS, layouts_of
from hemiola.runtime.errors import Refused, one_line, shown
from hemiola.runtime.manifest_parts import OpNode, Segment

SIZES = "TNWL"  # what is free in a step


class Lowered:
    """A segment as a step, with the signature of the program that it was."""

    def __init__(
        self,
        program: GraphModule,
        segment: Segment,
        bound: Sequence[torch.Tensor],
        poisoned: bool = False,
        hidden: str = "T",
    ) -> None:
        """`bound`: the tensors of its weights, then of its states; see RecordedStep for `poisoned`. `hidden`:
        the letter of how many hidden states the program computes."""
        self._program, self._segment, self._bound = program, segment, bound
        self._letters = ("L", hidden)
        self._shapes = {name: INPUTS[segment.name][name] for name in segment.inputs}
        code = Recorder()
        outputs = self.record(code, self._inputs(code))
        self._widths = [view.shape[1] for view in outputs]
        results = [f"result.{name}" for name in OUTPUTS]
        for name, view in zip(results, outputs, strict=True):
            view.buffer.input = name
        self._given = dict.fromkeys([*SIZES, *segment.inputs, *results], 0)
        self._step = RecordedStep(code, list(self._given), poisoned)

    def record(self, code: Recorder, inputs: Mapping[str, View]) -> list[View]:
        """The program as a part of a step: logits and hidden states."""
        return _Lowering(self._segment, self._bound, code, inputs).run(self._program)

    def room(self, size: int) -> int:
        """Bytes of a step of so many tokens, rows, lines and pages of a row."""
        return self._step.room(dict.fromkeys(SIZES, size))

    def _inputs(self, code: Recorder) -> dict[str, View]:
        """At addresses that the step is given."""
        made = {}
        nodes = list(self._program.graph.nodes)[len(self._bound) :]
        for (name, letters), node in zip(self._shapes.items(), nodes, strict=False):
            value = node.meta["val"]
            shape = [FreeSize(a) if a in SIZES else int(b) for a, b in zip(letters, value.shape, strict=True)]
            made[name] = code.input(name, tuple(shape), value.dtype)
        return made

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits [L, V] and hidden states [T, F], or [L, F]."""
        given, kept = self._given.copy(), []
        for (name, shape), tensor in zip(self._shapes.items(), inputs, strict=True):
            kept.append(dense := tensor.contiguous())
            given[name] = dense.data_ptr()
            for letter, size in zip(shape, dense.shape, strict=True):
                if letter in given:
                    given[letter] = size
        results = []
        for name, letter, width in zip(OUTPUTS, self._letters, self._widths, strict=True):
            results.append(result := torch.empty(given[letter], width))
            given[f"result.{name}"] = result.data_ptr()
        self._step.run(given)
        return tuple(results)


class _Lowering:
    """Walks a program once; `values` holds what its nodes are here: views, or lists of them."""

    def __init__(
        self, segment: Segment, bound: Sequence[torch.Tensor], code: Recorder, inputs: Mapping[str, View]
    ) -> None:
        self._segment = segment
        self._given = iter([*map(code.given, bound), *(inputs[name] for name in segment.inputs)])
        self._ops = iter(segment.nodes)
        self._values: dict[Node, Any] = {}
        self._layouts: dict[Node, dict[str, Layout]] = {}  # of quantised weights

    def run(self, program: GraphModule) -> list[View]:
        """The program's results."""
        self._layouts = layouts_of([*program.graph.nodes], self._segment)
        for node in program.graph.nodes:
            match node.op:
                case "placeholder":
                    self._values[node] = next(self._given)
                case "output":
                    return self._results(node)
                case _ if node.target in OURS:
                    self._values[node] = self._op(node, next(self._ops))
                case _:
                    self._values[node] = self._function(node)
        raise AssertionError("a program ends with its output")

    def _results(self, node: Node) -> list[View]:
        """Each is written where a step wants it."""
        values: Any = node.args[0]
        found = [self._result(value) for value in values]
        if len({id(view.buffer) for view in found}) < len(found):
            raise self._refused(node, "has one value for two results")
        return found

    def _result(self, node: Node) -> View:
        view = self._values[node]
        if view.buffer.line_bytes != view.shape[1] * view.itemsize:  # an input's and a tensor's are 0
            raise self._refused(node, "ends the program, but is a part of something else")
        return view

    def _op(self, node: Node, chosen: OpNode) -> Any:
        """Our op, in the form that was chosen when the engine was built."""
        function = OPS[chosen.op].bind(chosen.form, chosen.sizes, self._layouts[node])
        try:
            return function(*(_mapped(value, self._values) for value in node.args))
        except ValueError as error:  # numbers that lie apart
            raise self._refused(node, f"cannot run ({one_line(error)})") from None

    def _function(self, node: Node) -> Any:
        args = [_mapped(value, self._values) for value in node.args]
        if node.target is operator.getitem:
            if not isinstance(args[0], (list, tuple)):
                raise self._refused(node, f"takes item {args[1]} of one value")
            return args[0][args[1]]
        name = getattr(getattr(node.target, "_overloadpacket", None), "__name__", str(node.target))
        handler: MethodType | None = getattr(self, f"_lower_{name}", None)
        if handler is None or node.kwargs:
            raise self._refused(node, f"calls torch's {name}, which no kernel computes")
        if len(args) != handler.__code__.co_argcount - 2:  # besides self and node
            raise self._refused(node, f"calls torch's {name} with {len(args)} arguments")
        return handler(node, *args)

    def _refused(self, node: Node, reason: str) -> Refused:
        message = f"{self._segment.file}: {node.name} {reason}"
        return Refused("damaged", message=message, way_out="run build-engine again")

    # What torch's functions become, by name.

    def _lower_view(self, node: Node, x: View, shape: list[int]) -> View:
        if shape[0] != -1 or not x.in_lines or math.prod(shape[1:]) != math.prod(x.shape[1:]):
            raise self._refused(node, f"views {x.shape} as {shape}, which would have to be copied")
        return x.view(shape[1:])

    def _check_dim(self, node: Node, x: View, dim: int, last: int = -1) -> None:
        """Views know no dimensions from the end, and lines stay whole."""
        if not 1 <= dim <= len(x.shape) + last:
            raise self._refused(node, f"takes {x.shape} apart in dimension {dim}")

    def _lower_unsqueeze(self, node: Node, x: View, dim: int) -> View:
        self._check_dim(node, x, dim, last=0)
        return x.unsqueeze(dim)

    def _lower_split_with_sizes(self, node: Node, x: View, sizes: list[int], dim: int) -> list[View]:
        self._check_dim(node, x, dim)
        return x.split(sizes, dim)

    def _lower_split(self, node: Node, x: View, size: int, dim: int) -> list[View]:
        self._check_dim(node, x, dim)
        width = x.shape[dim]
        return x.split([min(size, width - at) for at in range(0, width, size)], dim)

    def _lower_chunk(self, node: Node, x: View, count: int, dim: int) -> list[View]:
        self._check_dim(node, x, dim)
        return self._lower_split(node, x, -(-x.shape[dim] // count), dim)

    def _lower_cat(self, node: Node, parts: list[View], dim: int) -> View:
        if dim != 1:
            raise self._refused(node, f"joins {parts[0].shape} in dimension {dim}, not lines side by side")
        for part in parts:
            self._check_lines(node, part)
        return moves.concatenate(parts)

    def _lower_index_select(self, node: Node, x: View, dim: int, ids: View) -> View:
        self._check_lines(node, x)
        return moves.gather(x, ids)

    def _lower_relu(self, node: Node, x: View) -> View:
        self._check_lines(node, x)
        return x if _is_squared(node) else moves.combine(moves.RELU, x, x)

    def _lower_mul(self, node: Node, a: View, b: View) -> View:
        self._check_terms(node)
        if _is_squared(node.args[0]):
            return moves.combine(moves.SQUARED_RELU, a, a)
        return self._combine(node, moves.PRODUCT, a, b)

    def _lower_add(self, node: Node, a: View, b: View) -> View:
        self._check_terms(node)
        return self._combine(node, moves.SUM, a, b)

    def _check_terms(self, node: Node) -> None:
        for term in node.args:
            if not isinstance(term, Node):
                raise self._refused(node, f"calculates with {shown(term)}, which is no value of the program")

    def _check_lines(self, node: Node, x: View) -> None:
        """Kernels of moves take lines of numbers in fp32, whatever lies there: narrow ones end sooner."""
        if len(x.shape) != 2 or x.dtype != torch.float32:
            raise self._refused(
                node, f"takes lines of {x.dtype} {list(x.shape[1:])}, kernels take one dimension of float32"
            )

    def _lower_to(self, node: Node, x: View, dtype: torch.dtype) -> View:
        if dtype != x.dtype:
            raise self._refused(node, f"turns {x.dtype} into {dtype}, which no kernel does")
        return x

    def _combine(self, node: Node, kind: int, a: View, b: View) -> View:
        self._check_lines(node, a)
        self._check_lines(node, b)
        if a.shape != b.shape:
            raise self._refused(node, f"combines {a.shape} and {b.shape}, not lines of one length")
        return moves.combine(kind, a, b)


def _mapped(value: Any, values: dict[Node, Any]) -> Any:
    """An argument with what stands for its nodes."""
    if isinstance(value, (list, tuple)):
        return [values.get(part, part) for part in value]
    return values[value] if isinstance(value, Node) else value


def _is_squared(node: Any) -> bool:
    """A relu that is multiplied with itself and used for nothing else."""
    users = list(node.users)
    return (
        node.target is torch.ops.aten.relu.default
        and len(users) == 1
        and users[0].target is torch.ops.aten.mul.Tensor
        and users[0].args[0] is users[0].args[1]
    )
