"""Segments in pieces: parts in onnxruntime, our compiled ops between them."""

import hashlib
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import checkpoints
from kit.harness import Harness

from hemiola.runtime import manifest
from hemiola.runtime.device.segments.pieces import CutSegment
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest_parts import PARTS

Get = Callable[..., Path]
TOLERANCE = 1e-4  # fp32: onnxruntime sums in another order
TOKENS = torch.randint(3, checkpoints.VOCAB, (70,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_pieces_equal_the_whole_model(family: str, tiny_engine: Get) -> None:
    """Trunk and MTP head, over pieces of a prompt and single tokens; states and pages too."""
    whole, cut = Harness(tiny_engine(family)), Harness(tiny_engine(family, target="onnxruntime"))
    assert cut.manifest.target == "onnxruntime" and cut.manifest.promise == "tokens"
    made = []
    for harness in (whole, cut):
        logits = harness.run(TOKENS, 1, 14, 1, 1, 15, 32)
        request = harness.request()
        harness.step([(request, TOKENS, 0)])
        hidden = harness.hidden
        made.append((logits, hidden, *harness.draft(request, TOKENS[1:], hidden[:-1], 1)))
    for one, other in zip(*made, strict=True):
        assert (one - other).abs().max() < TOLERANCE
    for name, state in whole.states.items():
        assert ((state - cut.states[name]).abs() < TOLERANCE)[~state.isnan()].all(), name
        assert torch.equal(state.isnan(), cut.states[name].isnan()), name


def test_values_are_given_back_when_nobody_reads_them_any_more(
    tiny_engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tiny_engine("qwen3_5", target="onnxruntime"))
    program = harness.programs["trunk"]._call.__wrapped__.func
    assert isinstance(program, CutSegment)
    alive: list[weakref.ref] = []
    most = 0
    steps = []
    for step in program._steps:

        def run(inputs: list, own: Callable = step.run) -> list:
            nonlocal most
            made = list(own(inputs))
            alive.extend(weakref.ref(value) for value in made)
            most = max(most, sum(ref() is not None for ref in alive))
            return made

        steps.append(step._replace(run=run))
    program._steps = steps
    harness.run(TOKENS[:5])
    assert len(alive) > 40 and most < 16


def broken(tiny_engine: Get, folder: Path, change: Callable[[Path], None]) -> Path:
    """A copy of an engine whose first part was changed and stands in the manifest like that."""
    engine_dir = shutil.copytree(tiny_engine("qwen3_5", target="onnxruntime"), folder / "engine")
    found = manifest.load(engine_dir)
    part = engine_dir / PARTS / found.segments[0].pieces[0].name
    change(part)
    sha256 = found.sha256 | {str(part.relative_to(engine_dir)): hashlib.sha256(part.read_bytes()).hexdigest()}
    found.model_copy(update={"sha256": sha256}).write(engine_dir)
    return engine_dir


def test_a_part_that_cannot_be_read_is_refused(tiny_engine: Get, tmp_path: Path) -> None:
    engine_dir = broken(tiny_engine, tmp_path, lambda path: path.write_bytes(b"\x08\x07 no graph"))
    with pytest.raises(Refused, match=r"parts/.* cannot be loaded .*; run build-engine again"):
        Harness(engine_dir)


def test_a_damaged_part_is_found_by_its_hash(tiny_engine: Get, tmp_path: Path) -> None:
    engine_dir = shutil.copytree(tiny_engine("qwen3_5", target="onnxruntime"), tmp_path / "engine")
    part = next((engine_dir / PARTS).iterdir())
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(Refused, match=rf"{part.name} was changed after the build .*; run build-engine again"):
        manifest.load(engine_dir)
    part.unlink()
    with pytest.raises(Refused, match=rf"{part.name} is missing; run build-engine again"):
        manifest.load(engine_dir)


def test_infinite_attributes_survive_the_manifest(tiny_engine: Get) -> None:
    """Mamba2's dt_max is inf, which JSON has no word for."""
    engine_dir = tiny_engine("nemotron_h_dense", target="onnxruntime")
    (found,) = {
        piece.constants
        for piece in manifest.load(engine_dir).segment("trunk").pieces
        if piece.name == "mamba2"
    }
    assert found == (16, 0.0, float("inf")) and [type(value) for value in found] == [int, float, float]
    assert "Infinity" in (engine_dir / manifest.FILE).read_text()
    json.loads((engine_dir / manifest.FILE).read_text())


def test_no_onnxruntime_is_said_when_the_engine_is_opened(
    tiny_engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_dir = tiny_engine("qwen3_5", target="onnxruntime")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(Refused, match=r"need onnxruntime [0-9.]+ .*; pip install onnxruntime"):
        Harness(engine_dir)
