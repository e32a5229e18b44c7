"""Engines of TensorRT-RTX, built by the real builder on a machine without a GPU, where none can run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from kit import quantised
from kit.kernels import uncompiled
from safetensors import safe_open

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is for Linux on x86-64")

from hemiola.builder import targets
from hemiola.builder.build import Options, build
from hemiola.builder.checkpoint import DTYPES
from hemiola.builder.targets.trt import network, rtx
from hemiola.builder.targets.trt.engines import interrupts_wait, refused
from hemiola.plugins import onnx as plugin_nodes
from hemiola.plugins.gpu.cover import calls_at
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.spec import Op
from hemiola.runtime import manifest
from hemiola.runtime.abi import INPUTS
from hemiola.runtime.device.segments import tensorrt
from hemiola.runtime.device.segments.pieces import CutSegment
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.manifest_parts import PARTS

Get = Callable[..., Path]
ALL = {"target": "tensorrt-rtx", "arch": ",".join(targets.RTX)}
SIGMOID = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 23]> part (float[N] x0) => (float[N] y0) { y0 = Sigmoid (x0) }'
)


# Parts of the other tiny checkpoints are of these shapes, or of the same graph from other names of tensors.
FAMILIES = ["nemotron_h_dense", "nemotron_h_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_built_for_all_architectures(family: str, tiny_engine: Get) -> None:
    engine_dir = tiny_engine(family, **ALL)
    found = manifest.load(engine_dir)
    assert found.target == "tensorrt-rtx" and found.promise == "tokens"
    assert found.arch == "sm_80,sm_86,sm_89,sm_120,sm_121"
    named = {piece.name for s in found.segments for piece in s.pieces if piece.kind == "part"}
    assert named == {path.name for path in (engine_dir / PARTS).iterdir()}
    for name in named:
        content = (engine_dir / PARTS / name).read_bytes()
        assert content[:4] == b"vtrt" and f"{PARTS}/{name}" in found.sha256
    for segment in found.segments:
        assert segment.compiler.startswith("tensorrt-rtx 1.")
        assert {node.form for node in segment.nodes} == {"cuda"}
        assert [profile.name for profile in segment.profiles] == ["decode", "prefill"]


def test_two_builds_give_the_same_bytes(tiny_checkpoint: Get, tiny_engine: Get, tmp_path: Path) -> None:
    """TensorRT-RTX 1.7 orders what is inside an engine by addresses."""
    engine_dir = tiny_engine("qwen3_5", **ALL)
    first = manifest.load(engine_dir)
    sizes = first.limits.model_dump(exclude={"num_drafts"})
    with uncompiled():
        again = build(tiny_checkpoint("qwen3_5"), tmp_path / "again", Options(**ALL, **sizes))
    if addresses_can_be_fixed():
        assert again == first
    else:
        kept = {"sha256": {}, "identity": ""}
        assert again.model_copy(update=kept) == first.model_copy(update=kept)


def test_the_bytes_of_a_part_do_not_depend_on_how_fast_it_is_handed_over(
    tiny_checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause behind 512 bytes changed the fourth, and one build in some dozens."""
    if not addresses_can_be_fixed():
        pytest.skip("personality(2) is forbidden here")
    asked = []
    with monkeypatch.context() as patch, uncompiled():
        patch.setattr(rtx, "alone", lambda *of: asked.append(of) or network.Built(b"vtrt", True))
        build(tiny_checkpoint("qwen3_5"), tmp_path / "engine", Options(target="tensorrt-rtx", arch="sm_89"))
    at_once = network.alone(*asked[3])
    write = os.write

    def slow(file: int, content: bytes) -> int:
        number = write(file, content[:512])
        time.sleep(1)
        return number

    monkeypatch.setattr(os, "write", slow)
    assert network.alone(*asked[3]) == at_once


def addresses_can_be_fixed() -> bool:
    """Docker forbids it by default."""
    ask = "import ctypes; print(ctypes.CDLL(None).personality(0x0040000))"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout == "0\n"


@pytest.mark.parametrize("allowed", [True, False])
def test_where_addresses_cannot_be_fixed_a_build_says_so(
    allowed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rtx._warn.cache_clear()
    monkeypatch.setattr(rtx, "alone", lambda *_: network.Built(b"vtrt", allowed))
    for _ in range(2):
        assert rtx.engine(SIGMOID, (), ("sm_89",)) == b"vtrt"
    assert capsys.readouterr().err.count("another build of this engine will differ") == (not allowed)
    rtx._warn.cache_clear()


def test_profiles_hold_every_step_that_the_limits_allow(tiny_engine: Get) -> None:
    found = manifest.load(tiny_engine("nemotron_h_moe", **ALL))
    limits, rows = found.limits, found.limits.max_rows
    decode, prefill = found.segment("trunk").profiles
    assert decode.sizes["tokens"] == (1, rows * 4, rows * 4) and decode.sizes["logits"][2] == rows * 4
    assert prefill.sizes["tokens"][2] == limits.max_step_tokens and prefill.sizes["logits"][0] == 0
    head = found.segment("draft").profiles[1].sizes
    assert head["tokens"][2] == limits.max_step_tokens + rows * 15 and head["logits"][2] == rows


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_5_moe"])
def test_kernels_are_compiled_for_tensors_as_parts_and_views_make_them(
    family: str, tiny_checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the strides of the whole program: a part's outputs lie in memory of their own."""
    monkeypatch.setattr(rtx, "engine", lambda model, *_: model.SerializeToString())
    sizes = {"max_len": 128, "max_rows": 4, "max_step_tokens": 128}
    with uncompiled():
        built = build(
            tiny_checkpoint(family), tmp_path / "e", Options(target="tensorrt-rtx", arch="sm_89", **sizes)
        )
    compiled = {file.binary.call for file in built.kernels[0].binaries}
    found = set()

    def bind(op: Op, form: str, sizes: object, layouts: object) -> Callable:
        def run(*values: Any) -> Any:
            launcher = getattr(import_module(f"hemiola.plugins.{op.name}.cuda"), op.name)
            found.update(calls_at(launcher, Gpu(89, 128), *values))
            return op._fake(*values)

        return run

    monkeypatch.setattr(Op, "bind", bind)
    monkeypatch.setattr(tensorrt, "opener", lambda compiler: Traced)
    weights = safe_open(tmp_path / "e" / built.weights_file, framework="pt").get_slice
    for segment in built.segments:
        for tokens in (1, 7, 16, 100):
            flat = [meta(weights(n).get_shape(), DTYPES[weights(n).get_dtype()]) for n in segment.weights]
            states = {state.name: state for state in built.states}
            flat += [meta((5, *states[n].shape), getattr(torch, states[n].dtype)) for n in segment.states]
            letters = {"T": tokens, "N": 3, "W": 2, "L": 3, "F": built.hidden_size, "8": 8}
            for name, shape in INPUTS[segment.name].items():
                dtype = torch.bfloat16 if name == "hidden" else torch.int32
                flat.append(meta([letters[letter] for letter in shape], dtype))
            CutSegment(tmp_path / "e", segment)(*flat)
    assert found and found <= compiled


def meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(list(shape), dtype=dtype, device="meta")


class Traced:
    """A part that makes tensors of the right shapes."""

    def __init__(self, path: Path) -> None:
        self._part = onnx.load(path).graph
        self.num_inputs = len(self._part.input)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        dtypes = {number: dtype for dtype, number in plugin_nodes.DTYPES.items()}
        sizes = {}
        for value, tensor in zip(self._part.input, inputs, strict=True):
            dims = value.type.tensor_type.shape.dim
            sizes |= {dim.dim_param: size for dim, size in zip(dims, tensor.shape, strict=True)}
        return [
            meta(
                [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim],
                dtypes[value.type.tensor_type.elem_type],
            )
            for value in self._part.output
        ]


def test_it_opens_on_its_architectures_only(tiny_engine: Get) -> None:
    with pytest.raises(
        Refused,
        match=r"built for sm_80,.*sm_121 \(compute capability 8.0 or .* 12.1\), but torch finds no CUDA",
    ):
        LLM(tiny_engine("qwen3_5", **ALL))


def test_what_the_compiler_refuses_comes_out_as_one_line() -> None:
    """It logs its reasons and returns nothing."""
    model = onnx.ModelProto()
    model.CopyFrom(SIGMOID)
    with pytest.raises(Refused, match=r"cannot compile the graph \(.*profile.*\); use --target torch"):
        rtx.engine(model, (), ("sm_89",))
    model.graph.node[0].op_type = "Foo"
    with pytest.raises(
        Refused, match=r"tensorrt-rtx 1[0-9.]+ cannot read the graph \(.*Foo.*\); use --target"
    ):
        rtx.engine(model, (), ("sm_89",))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_within_the_compiler_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Raised in what it calls of Python, it would be an error in its log, and the build would go on."""
    log = type(network.log_of(rtx.trt))
    said: list[str] = []

    def interrupted(self: object, severity: object, message: str) -> None:
        if not said:
            os.kill(os.getpid(), number)
        said.append(message)

    monkeypatch.setattr(log, "log", interrupted)
    profiles, model = [{"x0": ((1,), (4,), (4,))}], SIGMOID.SerializeToString()
    before = signal.signal(number, signal.default_int_handler)  # as build-engine has it
    try:
        with pytest.raises(KeyboardInterrupt), interrupts_wait() as came:
            network.build(rtx.trt, model, profiles, lambda config: None)
    finally:
        signal.signal(number, before)
    assert came == [number]
    assert said and network.build(rtx.trt, model, profiles, lambda config: None)


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "it died of signal 9, perhaps of too little memory"),
        ("sys.exit('a  reason')", "it ended with 1: a reason"),
    ],
)
def test_a_compiler_that_dies_takes_nobody_along(
    ends: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "doomed.py").write_text(f"import os, sys\n{ends}\n")
    monkeypatch.setattr(network, "__file__", str(tmp_path / "doomed.py"))
    with pytest.raises(Refused, match=rf"cannot compile the graph \({reason}\); use --target torch"):
        rtx.engine(SIGMOID, (), ("sm_89",))


def test_too_little_memory_is_no_fault_of_the_graph() -> None:
    """It logs that, and more."""
    errors = ["Unexpected exception std::bad_alloc", "IBuilder::buildSerializedNetwork: Error Code 1"]
    with pytest.raises(MemoryError, match=r"tensorrt-rtx 1[0-9.]+: Unexpected exception std::bad_alloc"):
        raise refused(rtx.trt, network.NotBuilt("compile", errors))


def test_a_compiler_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tensorrt_rtx.py").write_text("raise ImportError('libtensorrt_rtx.so.1: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt_rtx")
    monkeypatch.delitem(sys.modules, "hemiola.builder.targets.trt.rtx")
    with pytest.raises(
        Refused, match=r"cannot be loaded \(libtensorrt_rtx.so.1: no such file\); pip install"
    ):
        targets.pick("tensorrt-rtx", "sm_89")


def test_a_missing_compiler_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    monkeypatch.delitem(sys.modules, "hemiola.builder.targets.trt.rtx")
    with pytest.raises(Refused, match=r"--target tensorrt-rtx needs tensorrt_rtx; pip install -e '.*\[tens"):
        targets.pick("tensorrt-rtx", "sm_89")


QUANTISED = {  # and the architectures whose tensor cores have no such numbers
    "fp8": ("sm_89,sm_120,sm_121", "sm_86"),
    "int4": ("sm_89,sm_120,sm_121", ""),
    "nvfp4": ("sm_120,sm_121", "sm_89"),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_engines_of_quantised_weights_are_built(kind: str, tiny_checkpoint: Get, tmp_path: Path) -> None:
    """Dense layers by DequantizeLinear, experts by our kernels; codes stay codes."""
    archs, without = QUANTISED[kind]
    source, sizes = tiny_checkpoint("qwen3_5_moe_experts"), {"max_len": 64, "page_len": 32, "quantize": kind}
    if without:
        with pytest.raises(Refused, match=rf"is e\dm\d .*, which {without} does not multiply; leave it out"):
            options = Options(target="tensorrt-rtx", arch=f"{archs},{without}", **sizes)
            build(source, tmp_path / "refused", options)
    with uncompiled():
        built = build(source, tmp_path / "e", Options(target="tensorrt-rtx", arch=archs, **sizes))
    weights = safe_open(tmp_path / "e" / built.weights_file, framework="pt").get_slice
    for segment in built.segments:
        parts = [piece for piece in segment.pieces if piece.kind == "part"]
        read = {name for piece in parts for name in piece.inputs}
        dense = {name for name in segment.layouts if f"{name}.scales" in segment.weights}
        assert dense and dense | {f"{name}.scales" for name in dense} <= read
        for name in dense:
            assert weights(name).get_dtype() == "U8" and weights(f"{name}.scales").get_dtype() == "F32"
        moes = [node for node in segment.nodes if node.op == "moe"]
        assert {node.form for node in moes} == {"coded"}
        rest = [p for p in segment.pieces if p.name == "moe"]
        assert len(rest) == len(moes) and {n for p in rest for n in p.inputs} & segment.layouts.keys()


def test_what_its_builder_does_not_take_is_refused_by_name(tiny_checkpoint: Get, tmp_path: Path) -> None:
    copies = quantised.quantise(tiny_checkpoint("qwen3_5"), tmp_path, quantised.RECIPES["awq"])
    with pytest.raises(
        Refused, match=r"tensorrt-rtx: .*weight is int4 32 zeros: it has zero points; build for"
    ):
        build(copies.quantised, tmp_path / "e", Options(target="tensorrt-rtx", arch="sm_89"))
