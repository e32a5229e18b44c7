"""What the runtime calls of TensorRT-RTX, seen by a double that computes on a CPU (kit/fake_tensorrt)."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit import fake_tensorrt
from kit.harness import Harness

from hemiola.runtime import manifest
from hemiola.runtime.device.segments import pieces, tensorrt
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest_parts import Profile

Get = Callable[..., Path]
TOKENS = list(range(3, 60))
PROFILES = tuple(
    Profile(name=name, sizes={"tokens": (1, most, most), "logits": (0, most, most)})
    for name, most in (("decode", 8), ("prefill", 64))
)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[fake_tensorrt.Engine]:
    """Engines of target onnxruntime open as if TensorRT-RTX 9.9 ran them; these were opened."""
    found: list[fake_tensorrt.Engine] = []
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake_tensorrt.module("9.9", PROFILES, found))
    stream = SimpleNamespace(cuda_stream=5, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(pieces, "MODULES", {"onnxruntime": "tensorrt"})
    opener = tensorrt.opener
    monkeypatch.setattr(tensorrt, "opener", lambda compiler: opener("tensorrt-rtx 9.9"))
    return found


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_5"])
def test_parts_get_shapes_addresses_and_the_smallest_profile(
    family: str, tiny_engine: Get, engines: list[fake_tensorrt.Engine]
) -> None:
    engine_dir = tiny_engine(family, target="onnxruntime")
    harness = Harness(engine_dir)
    logits = harness.run(TOKENS, 8, 1, 1, 9)
    whole = Harness(tiny_engine(family)).run(TOKENS)
    assert (logits - whole).abs().max() < 1e-4
    segment = manifest.load(engine_dir).segment("trunk")
    kinds = [piece.name for piece in segment.pieces if piece.kind == "part"]
    calls = {len(engine.calls): engine.calls for engine in engines}
    shared = max(kinds.count(kind) for kind in kinds)
    assert calls[5 * shared] == [0] * 3 * shared + [1] * 2 * shared


def test_a_step_without_logits_has_addresses(tiny_engine: Get, engines: list[fake_tensorrt.Engine]) -> None:
    """An empty tensor's address is 0, which TensorRT refuses."""
    harness = Harness(tiny_engine("qwen3_5", target="onnxruntime"))
    program, none = harness.programs["trunk"], torch.empty(0, dtype=torch.int32)
    rows = torch.tensor([[0, 3, 0, 1, 0, 0, 0, 0]], dtype=torch.int32)
    ids = torch.tensor([5, 6, 7], dtype=torch.int32)
    table = torch.tensor([[1]], dtype=torch.int32)
    inputs = {"token_ids": ids, "positions": ids - 5, "rows": rows, "page_table": table, "logits_ids": none}
    logits, hidden = program(inputs[name] for name in program.inputs)
    assert logits.shape[0] == 0 and hidden.shape[0] == 3 and not hidden.isnan().any()


def test_a_step_that_no_profile_takes_is_not_run(
    tiny_engine: Get, engines: list[fake_tensorrt.Engine]
) -> None:
    harness = Harness(tiny_engine("qwen3_5", target="onnxruntime"))
    with pytest.raises(RuntimeError, match=r"no profile of the engine takes .*65"):
        harness.run([*range(3, 68)])
    assert not any(engine.calls for engine in engines)


def test_other_versions_and_foreign_files_are_refused(
    tmp_path: Path, engines: list[fake_tensorrt.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake_tensorrt.module("9.9", PROFILES, engines))
    with pytest.raises(
        Refused, match=r"built by tensorrt-rtx 9.8, here is 9.9; run build-engine again, or pip"
    ):
        tensorrt.opener("tensorrt-rtx 9.8")
    (tmp_path / "part").write_bytes(b"foreign")
    with pytest.raises(Refused, match=r"part cannot be loaded by tensorrt-rtx 9.9.*; run build-engine again"):
        tensorrt.opener("tensorrt-rtx 9.9")(tmp_path / "part")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(Refused, match=r"need tensorrt 11.4 .*; pip install tensorrt-cu13==11.4"):
        tensorrt.opener("tensorrt 11.4")
