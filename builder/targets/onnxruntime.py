"""The double of tensorrt-rtx on a CPU: onnxruntime runs the same parts, our compiled ops between them."""

import onnxruntime

from hemiola.builder.graph import Graph
from hemiola.builder.lazy import Lazy
from hemiola.builder.onnx import outputs, to_onnx
from hemiola.builder.passes.cut import cut
from hemiola.builder.targets.torch import CompiledSegment, Job, choose_forms
from hemiola.plugins.onnx import is_plugin
from hemiola.runtime.manifest_parts import PARTS


def compile(graph: Graph, weights: dict[str, Lazy], job: Job) -> CompiledSegment:
    """A part is a graph in a file of its own; segments share those of equal content."""
    nodes, packed = choose_forms(graph, weights, job.device, is_plugin)
    pieces, parts = cut(to_onnx(graph), graph.weights)
    folder = job.folder / PARTS
    folder.mkdir(exist_ok=True)
    for name, part in parts.items():
        (folder / name).write_bytes(part.SerializeToString(deterministic=True))
    compiler = f"onnxruntime {onnxruntime.__version__}"
    return CompiledSegment(nodes, packed, pieces=pieces, outputs=tuple(outputs(graph)), compiler=compiler)
