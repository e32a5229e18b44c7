"""TensorRT: a segment is one engine with its weights, our ops' kernels inside it as plugins.

It times its kernels on the GPU that the engine is for, so it compiles only there.
"""

import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hemiola.builder.graph import Graph
from hemiola.builder.lazy import Lazy
from hemiola.builder.onnx import outputs, to_onnx, with_weights
from hemiola.builder.targets.torch import CompiledSegment, Job, Report, choose_forms
from hemiola.builder.targets.trt.engines import interrupts_wait, lay_out, make_profiles, refused, shapes_of
from hemiola.builder.targets.trt.network import NotBuilt, build, log_of
from hemiola.builder.targets.trt.nodes import told_beforehand, with_forms, with_kernels
from hemiola.builder.targets.trt.registry import register_kernels
from hemiola.builder.weights import write_weights
from hemiola.plugins.cpu.cache import cache_dir
from hemiola.plugins.onnx import is_plugin
from hemiola.runtime.arch import ARCHS
from hemiola.runtime.device.segments.tensorrt_ops import register
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest_parts import PARTS, SegmentPiece

trt: Any = import_module("tensorrt")


def compile(graph: Graph, weights: dict[str, Lazy], job: Job) -> CompiledSegment:
    """The engine, and beside it what TensorRT's inspector says of it."""
    _refuse_other_gpus(job.archs)
    register()
    nodes, packed = choose_forms(graph, weights, job.device, is_plugin)
    lay_out(graph)
    kernels = told_beforehand(graph, job)
    for node_kernels in kernels:
        if not isinstance(node_kernels, str):
            register_kernels(node_kernels.entries, node_kernels.plan.memory)
    profiles = make_profiles(job.limits, graph, "TLNWPS")
    folder = job.folder / PARTS
    folder.mkdir(exist_ok=True)
    kept = cache_dir()
    timings = kept and kept / f"tensorrt-{trt.__version__}-{job.archs[0]}.timings"
    with tempfile.TemporaryDirectory(dir=job.folder) as beside:
        file = Path(beside) / "weights.safetensors"
        write_weights(packed, file, job.report)
        model = with_weights(with_kernels(to_onnx(graph), kernels), file)
        content, path = model.SerializeToString(), str(file.with_name(f"{graph.name}.onnx"))
        with interrupts_wait() as interrupts:
            setup = _Setup(graph.name, job.report, timings, interrupts)
            try:
                engine = build(trt, content, shapes_of(model.graph.input, profiles), setup, path)
            except NotBuilt as failure:
                raise refused(trt, failure) from None
    setup.keep_timings()
    (folder / graph.name).write_bytes(engine)
    (folder / f"{graph.name}.json").write_text(_inspected(engine))
    inputs = tuple(value.name for value in model.graph.input)
    names = tuple(outputs(graph))
    return CompiledSegment(
        with_forms(nodes, kernels),
        weights={},  # they are in the engine
        pieces=(SegmentPiece(kind="part", name=graph.name, inputs=inputs, outputs=names),),
        outputs=names,
        compiler=f"tensorrt {trt.__version__}",
        profiles=profiles,
    )


class _Setup:
    """What the builder is told, and what it has timed for the next build."""

    def __init__(self, name: str, report: Report, timings: Path | None, interrupts: Sequence[int]) -> None:
        self._monitor, self._file = _monitor(name, report, interrupts), timings
        self._timings: Any = None

    def __call__(self, config: Any) -> None:
        config.progress_monitor = self._monitor
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for the inspector
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        # an engine is for all GPUs of its compute capability, not just for the model that built it
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY
        self._timings = config.create_timing_cache(
            self._file.read_bytes() if self._file is not None and self._file.is_file() else b""
        )
        config.set_timing_cache(self._timings, ignore_mismatch=False)

    def keep_timings(self) -> None:
        """Whole or not at all. Without them the engine is what it is, and the next build takes longer."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._file.parent) as beside:
                (made := Path(beside) / self._file.name).write_bytes(bytes(self._timings.serialize()))
                made.replace(self._file)
        except OSError as failure:
            print(f"warning: {self._file} cannot be written ({failure.strerror})", file=sys.stderr)


def _monitor(segment: str, report: Report, interrupts: Sequence[int]) -> Any:
    """TensorRT's phases, as the stages of a build, which ends when it is interrupted."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            super().__init__()
            self.steps: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:
            self.steps[name] = num_steps
            report(f"{segment}: {name}", 0, 0)

        def step_complete(self, name: str, step: int) -> bool:
            report(f"{segment}: {name}, {step + 1} of {self.steps[name]}", 0, 0)
            return not interrupts

        def phase_finish(self, name: str) -> None:
            report(segment, 0, 0)

    return Monitor()


def _inspected(content: bytes) -> str:
    engine = trt.Runtime(log_of(trt)).deserialize_cuda_engine(content)
    inspector = engine.create_engine_inspector()
    return inspector.get_engine_information(trt.LayerInformationFormat.JSON)


def _refuse_other_gpus(archs: tuple[str, ...]) -> None:
    arch, *more = archs
    if more:
        message = f"--arch {','.join(archs)}: --target tensorrt compiles for one"
        raise Refused("unsupported", "arch", message=message, way_out="build an engine for each")
    needed = ".".join(map(str, ARCHS[arch].capability or ()))
    law = (
        f"--target tensorrt compiles on the GPU that the engine is for ({arch}, compute capability {needed})"
    )
    if not torch.cuda.is_available():
        message = f"{law}, and torch finds no CUDA device here"
        way_out = "use --target tensorrt-rtx or torch, which need none"
        raise Refused("not_found", "arch", message=message, way_out=way_out)
    capability = ".".join(map(str, torch.cuda.get_device_capability(0)))
    if capability != needed:
        name = torch.cuda.get_device_name(0)
        message = f"{law}, but {name} has {capability}"
        raise Refused("unsupported", message=message, way_out=f"use --arch sm_{capability.replace('.', '')}")
