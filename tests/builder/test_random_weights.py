"""Engines of a config alone: they answer, and the same each time they are opened."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import checkpoints
from kit.harness import Harness

from hemiola.builder import random_weights
from hemiola.builder.build import Options, build
from hemiola.builder.formats.rounded import quantised
from hemiola.builder.lazy import Lazy
from hemiola.plugins.gpu.lines import pack_lines
from hemiola.plugins.gpu.words import pack_words
from hemiola.plugins.spec import Pack
from hemiola.runtime import manifest
from hemiola.runtime.errors import Refused


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_an_engine_of_a_config_answers_and_again_the_same(
    family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_weights, "LARGE", 5000)
    (tmp_path / "config").mkdir()
    shutil.copy(tiny_checkpoint(family) / "config.json", tmp_path / "config")
    options = Options(max_len=64, max_rows=1, page_len=32, random_weights=True)
    built = build(tmp_path / "config", tmp_path / "engine", options)
    assert (built.drafts == "mtp") == (family != "qwen3_next"), "its config does not name the head"
    assert built.drawn.keys() > {"embed.weight"}
    assert built.drawn_bytes > 2 * checkpoints.VOCAB * built.hidden_size
    stored = (tmp_path / "engine" / built.weights_file).stat().st_size
    assert stored < built.drawn_bytes, "drawn and stored"
    first, again = (Harness(tmp_path / "engine").run([5, 6, 7, 8]) for _ in range(2))
    assert torch.equal(first, again) and 0.2 < first.std() < 5 and len(set(first.argmax(1).tolist())) > 1
    with pytest.raises(Refused, match=r"has no model.safetensors and no index"):
        build(tmp_path / "config", tmp_path / "other", options.model_copy(update={"random_weights": False}))


def test_what_is_drawn_is_packed_as_the_form_wants_it(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Shapes are those of the same engine with weights."""
    source, options = tiny_checkpoint("qwen3_5"), Options(max_len=64, max_rows=1, page_len=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_weights, "LARGE", 1)
        drawn = build(source, tmp_path / "drawn", options.model_copy(update={"random_weights": True})).drawn
    build(source, tmp_path / "real", options)
    real = Harness(tmp_path / "real").weights
    assert {name: d.shape for name, d in drawn.items()} == {name: tuple(real[name].shape) for name in drawn}
    assert manifest.load(tmp_path / "drawn").drawn == drawn


@pytest.mark.parametrize(("pack", "narrow"), [(pack_words, False), (pack_lines, True)])
def test_what_is_packed_for_a_gpu_is_drawn_too(pack: Pack, narrow: bool) -> None:
    """It was made and stored for inputs in e4m3: minutes and gigabytes."""
    plain = Lazy.all_at_once((2048, 1024), torch.bfloat16, lambda: pytest.fail("made"), 0.1)
    weight = quantised(plain, "fp8", narrow).packed(pack)
    found = random_weights.drawn({"w": weight})["w"]
    assert (found.shape, found.std) == ((2048, 1024), 0.1) and found.nbytes == weight.nbytes
    assert found.layout == "e4m3 128" + (" x e4m3 by group" if narrow else "")
