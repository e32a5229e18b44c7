"""torch.export of a segment against the engine ABI (runtime/abi.py).

A segment is called flat: its weights, then its states, then its inputs, each group in the manifest's order.
T tokens, N rows, W pages of a row, L logits, P pages and S slots are free; all else is fixed.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hemiola.builder.models import Model
from hemiola.builder.models.layers import declared_states
from hemiola.plugins.spec import Op
from hemiola.runtime.abi import INPUTS
from hemiola.runtime.device.program import EXACT, OURS
from hemiola.runtime.errors import Refused
from hemiola.runtime.outline import Limits, State

Name = Literal["trunk", "draft"]
DIMS = {"T": "tokens", "N": "rows", "W": "table", "L": "logits", "P": "pages", "S": "slots"}  # that are free
# Sizes to trace with: no two equal, none 0 or 1, so that none can be mistaken for another or a constant.
TRACED = {"T": 7, "N": 3, "W": 5, "L": 2, "P": 11, "S": 13}


@dataclass(frozen=True)
class Graph:
    """An exported segment and the names of what it is called with."""

    name: Name
    program: ExportedProgram
    weights: tuple[str, ...]
    states: tuple[State, ...]
    inputs: tuple[str, ...]

    def placeholders(self) -> list[Node]:
        """Of its weights, states and inputs."""
        return [node for node in self.program.graph.nodes if node.op == "placeholder"]

    def letters(self) -> dict[str, str]:
        """The letter of each free size, by the name that torch gave it."""
        shapes = [*map(_first, self.states), *(INPUTS[self.name][name] for name in self.inputs)]
        letters: dict[str, str] = {}
        for node, shape in zip(self.placeholders()[len(self.weights) :], shapes, strict=True):
            for size, letter in zip(node.meta["val"].shape, shape, strict=False):
                if isinstance(size, torch.SymInt):
                    letters[str(size)] = letter
        return letters


def export(model: Model, name: Name, limits: Limits) -> Graph:
    """Trace the segment `name` ("trunk" or "draft") on fake tensors; no weight is read."""
    segment = model.trunk if name == "trunk" else model.draft
    assert segment is not None
    states = tuple(declared_states(segment, limits))
    shapes = INPUTS[name]
    flat = _Flat(segment, list(model.weights(segment)), [state.name for state in states], list(shapes))
    with FakeTensorMode(shape_env=ShapeEnv()):
        weights = [torch.empty(p.shape, dtype=p.dtype) for p in segment.parameters()]
        stores = [
            torch.empty(TRACED[_first(state)], *state.shape, dtype=getattr(torch, state.dtype))
            for state in states
        ]
        inputs = [_input(key, shape, model) for key, shape in shapes.items()]
    dims = {letter: Dim(name) for letter, name in DIMS.items()}
    free = [None for _ in weights]
    free += [{0: dims[_first(state)]} for state in states]
    free += [
        {i: dims[letter] for i, letter in enumerate(shape) if letter in dims} for shape in shapes.values()
    ]
    with torch.no_grad():
        program = torch.export.export(
            flat, (*weights, *stores, *inputs), dynamic_shapes=(tuple(free),), strict=False
        )
    _strip(program)
    for node in program.graph.nodes:
        _refuse_inexact(node)
    return Graph(name, program, tuple(flat.weights), states, tuple(shapes))


def op_of(node: Node) -> Op | None:
    """The op of ours that a node calls."""
    return OURS.get(node.target)


class _Flat(nn.Module):
    """A segment as a function of tensors only; in a tuple, so that torch does not lift its parameters."""

    def __init__(self, segment: nn.Module, weights: list[str], states: list[str], inputs: list[str]) -> None:
        super().__init__()
        self.segment, self.weights, self.states, self.inputs = (segment,), weights, states, inputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = len(self.weights), len(self.weights) + len(self.states)
        weights = dict(zip(self.weights, tensors[:first], strict=True))
        states = dict(zip(self.states, tensors[first:second], strict=True))
        batch = dict(zip(self.inputs, tensors[second:], strict=True))
        return torch.func.functional_call(self.segment[0], weights, (states, batch))


def _first(state: State) -> str:
    return "P" if state.kind == "page" else "S"


def _input(key: str, shape: str, model: Model) -> torch.Tensor:
    sizes = [(TRACED | {"F": model.hidden_size, "8": 8})[letter] for letter in shape]
    return torch.empty(sizes, dtype=model.dtype if key == "hidden" else torch.int32)


def _strip(program: ExportedProgram) -> None:
    """Drop calls that compute nothing, and the traced tensors, which would be stored as an example."""
    for node in list(program.graph.nodes):
        if node.op == "call_function" and not node.users and "assert" in str(node.target):
            program.graph.erase_node(node)
    program.graph_module.recompile()
    program._example_inputs = None
    lifted = [spec.arg.name for spec in program.graph_signature.input_specs if spec.target is not None]
    assert not lifted, f"the graph holds tensors of its own: {lifted}"


def _refuse_inexact(node: Node) -> None:
    """A function of torch's whose bits may depend on an element's place or on the number of threads."""
    packet = getattr(node.target, "_overloadpacket", None)
    if packet is None or node.op != "call_function" or packet in vars(torch.ops.hemiola).values():
        return
    if node.target not in EXACT:
        message = f"the graph calls torch's {packet.__name__}, which may round by place"
        raise Refused("unsupported", message=message, way_out="make it an op of plugins/")
