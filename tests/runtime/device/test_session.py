"""Weights as a segment needs them, and what a forgotten LLM leaves behind."""

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from hemiola.runtime import manifest
from hemiola.runtime.device.session import load_weights
from hemiola.runtime.llm import LLM
from hemiola.runtime.manifest import Weight


def test_weights_are_cast_to_the_dtype_they_run_in(tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    stored = {"a": torch.randn(3).bfloat16(), "b": torch.randn(2), "unused": torch.randn(1)}
    save_file(stored, tmp_path / "w.safetensors")
    found = manifest.load(tiny_engine("qwen3_5"))
    weights = (Weight(name="a", dtype="float32"), Weight(name="b", dtype="float32"))
    changed = found.model_copy(update={"weights": weights, "weights_file": "w.safetensors"})
    loaded = load_weights(tmp_path, changed, ("b", "a"))
    assert list(loaded) == ["b", "a"] and all(t.dtype == torch.float32 for t in loaded.values())
    assert torch.equal(loaded["a"], stored["a"].float()) and torch.equal(loaded["b"], stored["b"])


def test_a_forgotten_llm_ends_its_thread(tiny_engine: Callable[..., Path]) -> None:
    before = threading.active_count()
    llm = LLM(tiny_engine("qwen3_5"), max_rows=1)
    assert threading.active_count() == before + 1
    del llm
    gc.collect()
    assert threading.active_count() == before
