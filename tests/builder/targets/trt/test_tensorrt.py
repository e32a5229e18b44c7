"""What the builder asks of TensorRT, seen by a double; and that every version has what is asked.

No engine was built: TensorRT's libraries are not here, and its builder wants a GPU.
"""

import ast
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import onnx
import pytest
import torch
from kit import tensorrt_bindings
from kit.kernels import uncompiled
from rich.console import Console

from hemiola.builder import models, targets
from hemiola.builder.build import Options, build
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.cli import summary
from hemiola.builder.graph import export
from hemiola.builder.onnx import to_onnx
from hemiola.builder.targets.torch import Job
from hemiola.builder.targets.trt import ptx, registry
from hemiola.builder.targets.trt.ahead import NotAhead
from hemiola.builder.targets.trt.engines import lay_out
from hemiola.builder.targets.trt.nodes import KERNELS, told_beforehand, with_kernels
from hemiola.plugins.onnx import PLUGIN
from hemiola.plugins.spec import Op
from hemiola.plugins.step import STEP_OPS
from hemiola.runtime.cli.inspected import forms as inspected
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest_parts import PARTS
from hemiola.runtime.outline import Limits

Get = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[4]
FILES = (
    "builder/targets/trt/network.py",
    "builder/targets/trt/tensorrt.py",
    "builder/targets/trt/registry.py",
    "runtime/device/segments/tensorrt_ops.py",
    "runtime/device/segments/tensorrt.py",
)
CLASSES = {  # of what our code holds, by the name that it has there
    "builder": "Builder", "network": "INetworkDefinition", "parser": "OnnxParser", "error": "ParserError",
    "config": "IBuilderConfig", "profile": "IOptimizationProfile", "engine": "ICudaEngine",
    "context": "IExecutionContext", "runtime": "Runtime",
    "inspector": "EngineInspector", "_timings": "ITimingCache",
}  # fmt: skip
RTX_ONLY = {
    "ICudaEngine.create_runtime_config",  # asked for where kernels are specialised at run time
    "DynamicShapesKernelSpecializationStrategy.NONE",
    "DynamicShapesKernelSpecializationStrategy",
    "ComputeCapability",  # of several architectures in one engine
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
}
VERSIONS = sorted(path.name for path in tensorrt_bindings.ROOT.glob("*") if (path / "done").is_file())


def asked() -> set[str]:
    """Names of TensorRT that our code uses: `trt.A.B`, `trtp.A`, and methods of the objects in CLASSES."""
    found: set[str] = set()
    for file in FILES:
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            parts: list[str] = []
            while isinstance(node, ast.Attribute):
                parts.insert(0, node.attr)
                node = node.value
            if not isinstance(node, ast.Name) or not parts:
                continue
            if node.id == "self" and parts[0] in CLASSES and len(parts) > 1:
                found.add(f"{CLASSES[parts[0]]}.{parts[1]}")
            elif node.id == "trt":
                found.add(".".join(parts[:2]))
            elif node.id == "trtp":
                found.add(f"plugin.{parts[0]}")
            elif node.id in CLASSES:
                found.add(f"{CLASSES[node.id]}.{parts[0]}")
    return found - {"__name__", "ParserError.errors"}


@pytest.mark.skipif(not VERSIONS, reason=tensorrt_bindings.MISSING)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_every_name_that_is_used(version: str) -> None:
    names = sorted(asked() - RTX_ONLY)
    assert len(names) > 40 and "IBuilderConfig.progress_monitor" in names and "plugin.register" in names
    script = str(ROOT / "tests" / "kit" / "tensorrt_bindings.py")
    command = [sys.executable, script, version, *names]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    assert made.stdout.endswith("missing:\n"), made.stdout


def test_tensorrt_rtx_has_every_name_that_is_used() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    own = {name for name in asked() if not name.startswith("plugin.")}
    missing = [name for name in sorted(own) if not tensorrt_bindings.has(trt, name)]
    assert missing == []


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MagicMock:
    """A TensorRT on an H100 that takes everything and makes engines of a few bytes."""
    import_module("torch._dynamo")  # looks for a GPU
    trt = MagicMock(__version__="11.4.0")
    trt.__name__ = "tensorrt"
    trt.ILogger = trt.IProgressMonitor = object
    trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED = 1
    trt.Builder().build_serialized_network.return_value = b"engine"
    trt.Builder().create_builder_config().create_timing_cache().serialize.return_value = b"times"
    inspector = trt.Runtime().deserialize_cuda_engine().create_engine_inspector()
    inspector.get_engine_information.return_value = "{}"
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", trt.plugin)
    monkeypatch.setattr(registry, "_registered", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    monkeypatch.delitem(sys.modules, "hemiola.builder.targets.trt.tensorrt", raising=False)
    module: Any = import_module("hemiola.builder.targets.trt.tensorrt")
    monkeypatch.setattr(module, "register", lambda: None)
    monkeypatch.setattr(module, "cache_dir", lambda: tmp_path / "cache")
    yield trt  # pyright: ignore[reportReturnType]
    sys.modules.pop("hemiola.builder.targets.trt.tensorrt")


def test_one_engine_per_segment_with_profiles_states_in_place_and_what_the_inspector_says(
    tiny_checkpoint: Get, tmp_path: Path, fake: MagicMock
) -> None:
    stages: list[str] = []
    options = Options(target="tensorrt", arch="sm_90", max_len=128, max_rows=4, max_step_tokens=64)
    with uncompiled():
        built = build(
            tiny_checkpoint("nemotron_h_moe"), tmp_path / "e", options, lambda stage, *_: stages.append(stage)
        )
    files = {name for name in built.sha256 if name.startswith(PARTS)}
    assert files == {f"parts/{name}{end}" for name in ("trunk", "draft") for end in ("", ".json")}
    config = fake.Builder().create_builder_config()
    config.set_preview_feature.assert_called_with(fake.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    level = fake.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY
    assert config.hardware_compatibility_level is level
    assert (tmp_path / "cache" / "tensorrt-11.4.0-sm_90.timings").read_bytes() == b"times"
    ranges = {
        call.args[0]: call.args[1:]
        for call in fake.Builder().create_optimization_profile().set_shape.mock_calls
    }
    assert ranges["rows"] == ((1, 8), (4, 8), (4, 8)) and ranges["page_table"][2] == (4, 2)
    assert ranges["token_ids"] == ((1,), (64 + 4 * 15,), (64 + 4 * 15,))  # the head's, the last one
    assert not any(name.endswith(".weight") for name in ranges), "weights are in the engine"
    trunk = built.segment("trunk")
    states = [state.name for state in built.states if not state.name.startswith("mtp.")]
    (piece,) = trunk.pieces
    assert (
        piece.inputs == (*states, *trunk.inputs)
        and trunk.weights == ()
        and trunk.compiler == "tensorrt 11.4.0"
    )
    content, path = fake.OnnxParser().parse.call_args.args
    assert b"weights.safetensors" in content and path.endswith("draft.onnx")
    registered = {call.args[0] for call in fake.plugin.aot_impl.mock_calls if call.args}
    kernels = {node.op_type for node in onnx.ModelProto.FromString(content).graph.node if node.domain}
    assert kernels and {f"hemiola::{kernel}" for kernel in kernels} <= registered
    assert {node.form for segment in built.segments for node in segment.nodes} == {"ptx"}
    launched = {entry.binary.call.kernel.rpartition(".")[0] for entry in built.kernels[0].binaries}
    of_one_rank = [op.name for op in STEP_OPS.values() if not op.exchanges]
    around = {name for name in of_one_rank if find_spec(f"hemiola.plugins.{name}.triton")}
    assert launched == {"gpu.clock"} | around  # segments' ops are the engine's own
    assert not [file for file in (tmp_path / "e").iterdir() if file.name.startswith("tmp")]
    config.progress_monitor.phase_start("Timing", None, 7)
    assert config.progress_monitor.step_complete("Timing", 2) and stages[-1] == "draft: Timing, 3 of 7"


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_5"])
def test_kernels_stand_where_their_ops_stood(family: str, tiny_checkpoint: Get, tmp_path: Path) -> None:
    """In an order in which each has what it needs; results and states keep their names."""
    checkpoint = Checkpoint(tiny_checkpoint(family))
    limits = Limits(max_len=128, max_rows=4, max_step_tokens=64, num_drafts=3, page_len=32, chunk_len=16)
    model = models.load(checkpoint, torch.ops.hemiola, chunk_len=16, max_len=128, dtype=torch.bfloat16)
    graph = export(model, "trunk", limits)
    lay_out(graph)
    found = told_beforehand(graph, Job(tmp_path, "cuda", ("sm_90",), limits))
    assert not [own for own in found if isinstance(own, str)]
    told = "".join(entry.ptx for own in found if not isinstance(own, str) for entry in own.entries)
    assert ".entry" in told and ".file" not in told and ".loc" not in told, (
        "names depend on where it was built"
    )
    whole = to_onnx(graph)
    made = with_kernels(whole, found)
    onnx.checker.check_model(made)  # every value is made before it is read, and once
    assert made.graph.output == whole.graph.output and made.graph.input == whole.graph.input
    kernels = [node for node in made.graph.node if node.domain]
    assert {node.domain for node in kernels} == {KERNELS} and len(kernels) > len(found)
    assert {attribute.name for node in kernels for attribute in node.attribute} == PLUGIN.keys()
    kept = [node for node in made.graph.node if not node.domain]
    assert [n for n in kept if n in whole.graph.node] == [n for n in whole.graph.node if not n.domain]
    assert with_kernels(whole, ["why not"] * len(found)).graph == whole.graph


def test_a_cache_that_cannot_be_written_costs_no_engine(
    fake: MagicMock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = sys.modules["hemiola.builder.targets.trt.tensorrt"]
    (tmp_path / "file").touch()
    setup = module._Setup("trunk", lambda *_: None, tmp_path / "file" / "times", ())
    setup(fake.Builder().create_builder_config())
    setup.keep_timings()
    assert re.match(r"warning: .*file/times cannot be written \(.+\)\n", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("failure", "error", "reason"),
    [
        ("interrupt", KeyboardInterrupt, None),
        ("memory", Refused, r"too little memory for the build \(tensorrt 11.4.0: \[x\] OutOfMemory"),
        ("disk", Refused, r"cannot be written \(No space left on device\); free space"),
    ],
    ids=["interrupt", "memory", "disk"],
)
def test_a_build_that_fails_leaves_nothing_and_the_next_one_works(
    tiny_checkpoint: Get,
    tmp_path: Path,
    fake: MagicMock,
    monkeypatch: pytest.MonkeyPatch,
    failure: str,
    error: type[BaseException],
    reason: str | None,
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job is deaf to it
    module: Any = sys.modules["hemiola.builder.targets.trt.tensorrt"]

    def fails(network: object, config: Any) -> None:
        if failure == "interrupt":  # while the compiler works, which heeds its monitor's word
            os.kill(os.getpid(), signal.SIGINT)
            assert not config.progress_monitor.step_complete("Timing", 0)
        if failure == "disk":
            raise OSError(28, "No space left on device")
        module.log_of(fake).log(fake.ILogger.ERROR, "[x] OutOfMemory (Requested size was 8 bytes.)")

    fake.ILogger = type("ILogger", (), {"INTERNAL_ERROR": 0, "ERROR": 1})
    fake.Builder().build_serialized_network.side_effect = fails
    folder, options = tmp_path / "here", Options(target="tensorrt", arch="sm_90", max_len=64, max_rows=2)
    source = tiny_checkpoint("qwen3_5")
    with uncompiled(), pytest.raises(error, match=reason):
        build(source, folder / "e", options)
    assert not [*folder.iterdir()]
    fake.Builder().build_serialized_network.side_effect = None
    with uncompiled():
        build(source, folder / "e", options)
    assert [path.name for path in folder.iterdir()] == ["e"]


def test_what_cannot_be_told_ahead_calls_back_and_says_why(
    tiny_checkpoint: Get, tmp_path: Path, fake: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(op: Op, *rest: Any) -> ptx.Ahead:
        if op.name == "delta":
            raise NotAhead("delta._step needs 60000 bytes of shared memory, TensorRT gives 49152")
        return ptx.ahead(op, *rest)

    monkeypatch.setattr(import_module("hemiola.builder.targets.trt.nodes"), "ahead", told)
    options = Options(
        target="tensorrt", arch="sm_90", max_len=128, max_rows=4, max_step_tokens=64, drafts="none"
    )
    with uncompiled():
        built = build(tiny_checkpoint("qwen3_5"), tmp_path / "e", options)
    forms = {node.op: (node.form, node.refused) for node in built.segments[0].nodes}
    assert forms["conv"] == ("ptx", {}) and forms["delta"][0] == "cuda"
    assert {entry.binary.call.kernel.split(".")[0] for entry in built.kernels[0].binaries} == {
        "delta",
        "gpu",
        "step",
    }
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary(built, tmp_path / "e"))
    assert "delta: python callback (delta._step needs" in (text := console.export_text())
    assert "conv: python callback" not in text
    console.print(inspected(built))
    text = console.export_text()
    assert re.search(r"delta +│ python callback │ +\d+ │ ptx: delta._step needs", text)
    assert re.search(r"conv +│ ptx ", text)


def test_what_is_missing_is_said(
    tiny_checkpoint: Get, tmp_path: Path, fake: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = tiny_checkpoint("qwen3_5"), {"target": "tensorrt", "max_len": 64, "max_rows": 2}
    with pytest.raises(
        Refused, match=r"\(sm_80, compute capability 8.0\), but H100 has 9.0; use --arch sm_90"
    ):
        build(source, tmp_path / "e", Options(**options, arch="sm_80"))
    with pytest.raises(Refused, match=r"--arch sm_90,sm_80: --target tensorrt compiles for one; build an"):
        build(source, tmp_path / "e", Options(**options, arch="sm_90,sm_80"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        Refused, match=r"compiles on the GPU .* no CUDA device here; use --target tensorrt-rtx"
    ):
        build(source, tmp_path / "e", Options(**options, arch="sm_90"))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    sys.modules.pop("hemiola.builder.targets.trt.tensorrt")
    with pytest.raises(Refused, match=r"--target tensorrt needs tensorrt; pip install -e '.*\[tensorrt\]'"):
        targets.pick("tensorrt", "sm_90")
    sys.modules["hemiola.builder.targets.trt.tensorrt"] = SimpleNamespace()  # pyright: ignore[reportArgumentType]
    assert not [file for file in tmp_path.iterdir() if file.name.startswith((".e", "e"))]
