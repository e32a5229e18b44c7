"""--kv-dtype fp8: transformers' numbers with rounded keys and values, a checkpoint's scales, bytes."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import checkpoints
from kit.harness import Harness
from oracle import Oracle
from safetensors.torch import load_file, save_file

from hemiola.builder.build import Options, build
from hemiola.plugins.spec import E4M3
from hemiola.runtime import manifest
from hemiola.runtime.config import state_bytes
from hemiola.runtime.errors import Refused

Get = Callable[..., Path]
SIZES = {"max_len": 256, "max_rows": 2, "max_step_tokens": 64, "page_len": 32, "drafts": "none"}
SCALES = {  # as ModelOpt writes them, and as compressed-tensors does
    "qwen3_5": {"k_proj.k_scale": torch.tensor(0.0371), "v_proj.v_scale": torch.tensor(0.0043)},
    "nemotron_h_moe": {"k_scale": torch.tensor([0.25]), "v_scale": torch.tensor([0.0117])},
}


@pytest.fixture
def scaled(tiny_checkpoint: Get, tmp_path: Path) -> Callable[..., Path]:
    """A family's checkpoint with these tensors beside its one layer of attention."""

    def make(family: str, scales: dict[str, torch.Tensor]) -> Path:
        folder = shutil.copytree(tiny_checkpoint(family), tmp_path / "checkpoint")
        tensors = load_file(file := folder / "model.safetensors")
        (prefix,) = {
            name.split("q_proj")[0] for name in tensors if "q_proj" in name and not name.startswith("mtp.")
        }
        more = {prefix + name: scale for name, scale in scales.items()}
        save_file(tensors | more, file, metadata={"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize("family", SCALES)
def test_logits_are_those_of_transformers_with_rounded_keys_and_values(
    family: str, scaled: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within fp32's sums in other orders; a scale that is taken for 1 would be far off."""
    folder = scaled(family, SCALES[family])
    model, tokens = checkpoints.reference(folder), [*range(20, 110)]
    scales = [float(scale) for scale in SCALES[family].values()]
    module: Any = sys.modules[type(model).__module__]
    attend = module.eager_attention_forward

    def rounding(
        layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any
    ) -> Any:
        k, v = ((x / s).clamp(-448, 448).to(E4M3).float() * s for x, s in zip((k, v), scales, strict=True))
        return attend(layer, q, k, v, *rest, **more)

    with torch.no_grad():
        plain = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        monkeypatch.setattr(module, "eager_attention_forward", rounding)
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    build(folder, tmp_path / "engine", Options(**SIZES, kv_dtype="fp8"))
    assert (Harness(tmp_path / "engine").run(tokens, 1, 30) - expected).abs().max() < 1e-4
    assert (Oracle(folder, kv_dtype=E4M3).logits(tokens) - expected).abs().max() < 1e-4
    assert (plain - expected).abs().max() > 1e-2


def test_a_page_has_a_byte_for_a_number_and_the_engine_another_identity(tiny_engine: Get) -> None:
    wide, narrow = (manifest.load(tiny_engine("qwen3_5", kv_dtype=kind)) for kind in ("auto", "fp8"))
    assert {s.dtype for s in narrow.states if s.kind == "page"} == {"float8_e4m3fn"}
    assert 4 * state_bytes(narrow.states, "page") == state_bytes(wide.states, "page")
    assert state_bytes(narrow.states, "slot") == state_bytes(wide.states, "slot")
    assert wide.identity != narrow.identity, "texts cached by one engine must not be found by the other"


def test_a_checkpoint_that_quantises_nothing_but_pages_is_built_with_either_kind(
    scaled: Callable[..., Path], tiny_engine: Get, tmp_path: Path
) -> None:
    folder = scaled("qwen3_5", SCALES["qwen3_5"])
    declared = {"quantization": {"kv_cache_quant_algo": "FP8", "quant_algo": None}}
    (folder / "hf_quant_config.json").write_text(json.dumps(declared))
    runs = []
    for kind in ("auto", "fp8"):
        build(folder, tmp_path / kind, Options(**SIZES, kv_dtype=kind))
        runs.append(Harness(tmp_path / kind).run([*range(20, 60)]))
    assert torch.equal(runs[0], Harness(tiny_engine("qwen3_5")).run([*range(20, 60)])), "scales do not matter"
    assert not torch.equal(*runs)


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (
            torch.tensor(0.0),
            "k_scale is 0.0, expected a positive number; correct it, or leave --kv-dtype fp8",
        ),
        (torch.tensor(torch.nan), "k_scale holds NaN or infinity"),
        (torch.ones(2), "k_scale has shape [2]"),
    ],
    ids=["zero", "NaN", "one for each head"],
)
def test_scales_that_are_not_one_positive_number_are_refused(
    scale: torch.Tensor, words: str, scaled: Callable[..., Path], tmp_path: Path
) -> None:
    folder = scaled("qwen3_5", {"k_proj.k_scale": scale})
    with pytest.raises(Refused) as refused:
        build(folder, tmp_path / "engine", Options(**SIZES, kv_dtype="fp8"))
    assert words in str(refused.value)
