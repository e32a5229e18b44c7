"""A segment that was cut: compiled parts, and our ops between them, in the order of the manifest."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch

from hemiola.plugins import OPS
from hemiola.plugins.groups import Layout
from hemiola.runtime.manifest_parts import PARTS, Segment, SegmentPiece

MODULES = {"onnxruntime": "onnxruntime", "tensorrt-rtx": "tensorrt", "tensorrt": "tensorrt"}
Tensors = Sequence[torch.Tensor]  # of a part by position, on the engine's device


class PieceRun(NamedTuple):
    run: Callable[[Tensors], Tensors]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    done: tuple[str, ...]  # values that nobody reads any more


class CutSegment:
    """Callable like an exported program: weights, states and inputs in, logits and hidden out."""

    def __init__(self, engine_dir: Path, segment: Segment) -> None:
        self._names = (*segment.weights, *segment.states, *segment.inputs)
        self._outputs = segment.outputs
        module = MODULES[segment.compiler.split()[0]]
        open_part = import_module(f"hemiola.runtime.device.segments.{module}").opener(segment.compiler)
        parts: dict[str, Callable[[Tensors], Tensors]] = {}
        forms = iter(segment.nodes)
        found = {name: Layout.parse(text) for name, text in segment.layouts.items()}
        self._steps: list[PieceRun] = []
        for piece, done in zip(segment.pieces, _last_reads(segment), strict=True):
            match piece.kind:
                case "part":
                    if piece.name not in parts:
                        parts[piece.name] = open_part(engine_dir / PARTS / piece.name)
                    run = parts[piece.name]
                case "view":
                    run = _view(piece)
                case "op":
                    node = next(forms)
                    assert node.op == piece.name, f"{segment.name}: {piece.name} is not {node.op}"
                    op = OPS[node.op]
                    given = zip(op.args, piece.inputs, strict=False)
                    layouts = {arg.name: found[name] for arg, name in given if name in found}
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


def _last_reads(segment: Segment) -> list[tuple[str, ...]]:
    """After every piece, what was made for it or before it and is not read again: memory to give back."""
    kept = {*segment.outputs, *segment.weights, *segment.states, *segment.inputs}
    done: list[tuple[str, ...]] = []
    for piece in reversed(segment.pieces):
        found = dict.fromkeys(name for name in (*piece.inputs, *piece.outputs) if name not in kept)
        kept |= found.keys()
        done.append(tuple(found))
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
    raise ValueError(f"no view {piece.name}")
