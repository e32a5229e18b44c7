"""A segment that was cut: compiled parts, and our ops between them, in the order of the manifest."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from hemiola.plugins import OPS
from hemiola.plugins.groups import Layout
from hemiola.runtime.abi import INPUTS, OUTPUTS
from hemiola.runtime.errors import Refused, shown
from hemiola.runtime.manifest_parts import PARTS, OpNode, Segment, SegmentPiece

VIEWS = ("view", "split", "unsqueeze")
MODULES = {"onnxruntime": "onnxruntime", "tensorrt-rtx": "tensorrt", "tensorrt": "tensorrt"}
Tensors = Sequence[torch.Tensor]  # of a part by position, on the engine's device


class Part(Protocol):
    """A compiled one."""

    @property
    def num_inputs(self) -> int: ...

    def __call__(self, inputs: Tensors, /) -> Tensors: ...


class PieceRun(NamedTuple):
    run: Callable[[Tensors], Tensors]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    done: tuple[str, ...]  # values that nobody reads any more


class CutSegment:
    """Callable like an exported program: weights, states and inputs in, logits and hidden out."""

    def __init__(self, engine_dir: Path, segment: Segment) -> None:
        check_pieces(segment)
        self._names = (*segment.weights, *segment.states, *segment.inputs)
        self._outputs = segment.outputs
        module = MODULES[segment.compiler.split()[0]]
        open_part = import_module(f"hemiola.runtime.device.segments.{module}").opener(segment.compiler)
        parts: dict[str, Part] = {}
        forms = iter(segment.nodes)
        weight_layouts = {name: Layout.parse(text) for name, text in segment.layouts.items()}
        self._steps: list[PieceRun] = []
        for piece, done in zip(segment.pieces, _last_reads(segment), strict=True):
            match piece.kind:
                case "part":
                    if piece.name not in parts:
                        parts[piece.name] = open_part(engine_dir / PARTS / piece.name)
                    run = parts[piece.name]
                    if run.num_inputs != len(piece.inputs):
                        taken = f"{run.num_inputs} inputs, the manifest gives {len(piece.inputs)}"
                        raise _damaged(segment, f"the part {piece.name} takes {taken}")
                case "view":
                    run = _view(piece)
                case "op":
                    node = next(forms)
                    op = OPS[node.op]
                    given = zip(op.args, piece.inputs, strict=False)
                    layouts = {
                        arg.name: weight_layouts[name] for arg, name in given if name in weight_layouts
                    }
                    run = _op(piece, op.bind(node.form, node.sizes, layouts))
            self._steps.append(PieceRun(run, piece.inputs, piece.outputs, done))

    def __call__(self, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip(self._names, flat, strict=True))
        for step in self._steps:
            made = step.run([values[name] for name in step.inputs])
            values.update(zip(step.outputs, made, strict=True))
            for name in step.done:
                del values[name]
        return tuple(values[name] for name in self._outputs)


def check_pieces(segment: Segment) -> None:
    """Raises Refused where pieces do not follow from each other. What a part does, nobody can tell."""
    known = {*segment.weights, *segment.states, *segment.inputs}
    on_cpu = MODULES[segment.compiler.split()[0]] == "onnxruntime"
    forms = iter(segment.nodes)
    if tuple(segment.inputs) != tuple(INPUTS[segment.name]):
        raise _damaged(segment, f"its inputs are {shown(list(segment.inputs))}")
    for piece in segment.pieces:
        if lost := [name for name in piece.inputs if name not in known]:
            raise _damaged(segment, f"{piece.name} reads {shown(lost[0])}, which nothing has computed")
        if wrong := _wrong_op(piece, next(forms, None), on_cpu) if piece.kind == "op" else _wrong_view(piece):
            raise _damaged(segment, f"{piece.name} {wrong}")
        if twice := [name for name in piece.outputs if name in known]:
            raise _damaged(segment, f"{piece.name} computes {shown(twice[0])}, which is there already")
        known |= {*piece.outputs}
    if len(segment.outputs) != len(OUTPUTS) or not known >= {*segment.outputs}:
        raise _damaged(segment, f"its outputs are {shown(list(segment.outputs))}")


def _wrong_op(piece: SegmentPiece, node: OpNode | None, on_cpu: bool) -> str:
    op = OPS.get(piece.name)
    if op is None or node is None or node.op != op.name:
        return f"is no op, or another one than {node and node.op}"
    if node.form not in {form.name for form in op.forms if form.device == "cpu" or not on_cpu}:
        return f"has no form {node.form!r} here"
    taken, given = (len(op.args), len(op.results)), (len(piece.inputs), len(piece.outputs))
    kinds = [type(value) for value in piece.constants]
    if taken != given or kinds != [attr.type for attr in op.attrs]:
        return f"takes and gives {given} values with {shown(list(piece.constants))}"
    return ""


def _wrong_view(piece: SegmentPiece) -> str:
    """Of a part nothing is known yet."""
    is_view = piece.name in VIEWS and len(piece.inputs) == 1
    if piece.kind == "view" and not (is_view and piece.constants and {*map(type, piece.constants)} == {int}):
        return f"is no view with {shown(list(piece.constants))}"
    return ""


def _damaged(segment: Segment, reason: str) -> Refused:
    message = f"the segment {segment.name} does not fit together: {reason}"
    return Refused("damaged", message=message, way_out="run build-engine again")


def _last_reads(segment: Segment) -> list[tuple[str, ...]]:
    """After every piece, what was made for it or before it and is not read again: memory to give back."""
    kept = {*segment.outputs, *segment.weights, *segment.states, *segment.inputs}
    done: list[tuple[str, ...]] = []
    for piece in reversed(segment.pieces):
        names = dict.fromkeys(name for name in (*piece.inputs, *piece.outputs) if name not in kept)
        kept |= names.keys()
        done.append(tuple(names))
    return done[::-1]


def _op(piece: SegmentPiece, function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]):
    def run(inputs: Tensors) -> Tensors:
        made = function(*inputs, *piece.constants)
        return (made,) if isinstance(made, torch.Tensor) else made

    return run


def _view(piece: SegmentPiece) -> Callable[[Tensors], Tensors]:
    numbers = [int(number) for number in piece.constants]
    match piece.name:
        case "view":
            return lambda inputs: (inputs[0].view(numbers),)
        case "split":
            return lambda inputs: inputs[0].split(numbers[:-1], numbers[-1])
        case "unsqueeze":
            return lambda inputs: (inputs[0].unsqueeze(numbers[0]),)
    raise AssertionError(f"no view {piece.name}")
