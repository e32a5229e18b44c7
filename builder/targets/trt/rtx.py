"""TensorRT-RTX: dense parts become engines for several architectures at once, on a machine without a GPU.

It has no plugins, so the graph is cut at our ops. Weights are inputs of a part, so that layers of the same
shapes share one engine, and weights lie once in the runtime's memory.
"""

import hashlib
import json
import sys
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import onnx

from hemiola.builder.dequantise import coded_weights, refuses_layout, stored
from hemiola.builder.formats.declared import SINCE
from hemiola.builder.graph import Graph
from hemiola.builder.lazy import Lazy
from hemiola.builder.onnx import outputs, to_onnx
from hemiola.builder.passes.cut import cut
from hemiola.builder.targets.torch import CompiledSegment, Job, choose_forms
from hemiola.builder.targets.trt.engines import lay_out, make_profiles, refused, shapes_of
from hemiola.builder.targets.trt.network import NotBuilt, alone
from hemiola.plugins.groups import Layout
from hemiola.plugins.onnx import is_plugin
from hemiola.runtime.arch import ARCHS
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest_parts import PARTS, Profile

trt: Any = import_module("tensorrt_rtx")


def compile(graph: Graph, weights: dict[str, Lazy], job: Job) -> CompiledSegment:
    """Build every part that no other segment has built."""
    layouts = coded_weights(graph, weights)
    for name, layout in layouts.items():
        _refuse(name, layout, weights[name].shape[1], job.archs)
    plain = {name: replace(weights[name], group=None) for name in layouts}
    nodes, packed = choose_forms(graph, weights | plain, job.device, is_plugin)
    for name in layouts:
        packed |= stored(name, weights[name])
    pieces, parts = cut(to_onnx(graph, layouts), packed)
    lay_out(graph, [output for piece in pieces if piece.kind == "view" for output in piece.outputs])
    profiles = make_profiles(job.limits, graph)
    folder = job.folder / PARTS
    folder.mkdir(exist_ok=True)
    content = json.dumps([p.model_dump() for p in profiles] + [job.archs, trt.__version__])
    names = {part: hashlib.sha256(f"{part}{content}".encode()).hexdigest()[:16] for part in parts}
    for i, (part, model) in enumerate(parts.items()):
        job.report(f"{graph.name}: part {i + 1} of {len(parts)}", 0, 0)
        if not (folder / names[part]).exists():
            (folder / names[part]).write_bytes(engine(model, profiles, job.archs))
    pieces = tuple(p.model_copy(update={"name": names.get(p.name, p.name)}) for p in pieces)
    return CompiledSegment(
        nodes,
        packed,
        pieces=pieces,
        outputs=tuple(outputs(graph)),
        compiler=f"tensorrt-rtx {trt.__version__}",
        profiles=profiles,
    )


def _refuse(name: str, layout: Layout, num_inputs: int, archs: tuple[str, ...]) -> None:
    """What DequantizeLinear, or the builder, does not take."""
    if reason := refuses_layout(layout, num_inputs):
        message = f"--target tensorrt-rtx: {name} is {layout}: {reason}"
        raise Refused("unsupported", "target", message=message, way_out="build for --target torch")
    since = {"e4m3": SINCE["FP8"], "e2m1": SINCE["NVFP4"]}.get(layout.kind, 0)
    capabilities = {arch: ARCHS[arch].capability or (0, 0) for arch in archs}
    if without := [a for a, (major, minor) in capabilities.items() if 10 * major + minor < since]:
        message = f"--target tensorrt-rtx: {name} is {layout}, which {', '.join(without)} does not multiply"
        raise Refused(
            "unsupported", "arch", message=message, way_out="leave it out, or build for --target torch"
        )


def engine(model: onnx.ModelProto, profiles: tuple[Profile, ...], archs: tuple[str, ...]) -> bytes:
    """One part for all architectures."""
    try:
        part = alone(trt, model.SerializeToString(), shapes_of(model.graph.input, profiles), archs)
    except NotBuilt as failure:
        raise refused(trt, failure) from None
    if not part.has_same_bytes:
        _warn()
    return part.engine


@cache
def _warn() -> None:
    """Once a process."""
    print(
        "warning: a process cannot have fixed addresses here (docker forbids personality(2) by default), so"
        " another build of this engine will differ in some bytes; its answers will not",
        file=sys.stderr,
    )
