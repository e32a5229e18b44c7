"""--kv-dtype: transformers' numbers with rounded keys and values, a checkpoint's scales, bytes, warnings."""

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
from hemiola.plugins.attention.pages import CODES, FORMATS
from hemiola.plugins.attention.reference import load, store
from hemiola.plugins.spec import E4M3
from hemiola.runtime import manifest
from hemiola.runtime.config import state_bytes
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM

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
    assert (Oracle(folder, kv_dtype="fp8").logits(tokens) - expected).abs().max() < 1e-4
    assert (plain - expected).abs().max() > 1e-2


def test_logits_are_those_of_transformers_with_keys_and_values_read_from_codes(
    tiny_checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within fp32's sums in other orders."""
    folder, tokens, kv = tiny_checkpoint("qwen3_5"), [*range(20, 110)], "turboquant_4bit_nc"
    model = checkpoints.reference(folder)
    module: Any = sys.modules[type(model).__module__]
    attend = module.eager_attention_forward

    def coded(layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any) -> Any:
        found = []
        for part, x, width in zip(("key", "value"), (k, v), FORMATS[kv].widths(k.shape[3]), strict=True):
            page = torch.zeros(x.shape[2] + 6, x.shape[1], width, dtype=CODES)  # 96 tokens
            for place in range(x.shape[2]):
                store(part, page, place, x[0, :, place], 1.0)
            read = load(part, page, x.shape[3], 1.0, torch.float32)[: x.shape[2]]
            found.append(read.transpose(0, 1)[None])
        return attend(layer, q, *found, *rest, **more)

    with torch.no_grad():
        plain = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        monkeypatch.setattr(module, "eager_attention_forward", coded)
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    build(folder, tmp_path / "engine", Options(**SIZES, kv_dtype=kv))
    assert (Harness(tmp_path / "engine").run(tokens, 1, 30) - expected).abs().max() < 1e-4
    assert (plain - expected).abs().max() > 1e-2


def test_codes_of_3_bits_warn_when_an_engine_is_built_and_when_it_is_opened(
    tiny_checkpoint: Get, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for kv, warns in (
        ("turboquant_3bit_nc", True),
        ("turboquant_k3v4_nc", True),
        ("turboquant_4bit_nc", False),
    ):
        build(tiny_checkpoint("qwen3_5"), tmp_path / kv, Options(**SIZES | {"kv_dtype": kv}))
        words = f"--kv-dtype {kv} keeps keys or values in 3 bits"
        assert (f"warning: {words}" in capsys.readouterr().err) == warns
        caplog.clear()
        with LLM(tmp_path / kv, progress=False):
            pass
        assert any(words in record.message for record in caplog.records) == warns


@pytest.mark.parametrize("kv", [kv for kv in FORMATS if kv.startswith("turboquant")])
def test_pages_of_codes_take_the_bytes_of_their_table(tiny_engine: Get, kv: str) -> None:
    """Padded to the size of a state they would save nothing (vllm 55196)."""
    found, wide = manifest.load(tiny_engine("qwen3_5", kv_dtype=kv)), manifest.load(tiny_engine("qwen3_5"))
    assert found.kv_dtype == kv and wide.kv_dtype == "auto" and found.identity != wide.identity
    (*_, depth), *_ = (s.shape for s in wide.states if s.kind == "page")
    per_head = sum(FORMATS[kv].widths(depth))
    assert state_bytes(found.states, "page") * 2 * depth * 4 == state_bytes(wide.states, "page") * per_head
    assert state_bytes(found.states, "slot") == state_bytes(wide.states, "slot")


def test_a_manifest_whose_pages_are_not_of_its_format_is_refused(tiny_engine: Get, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_engine("qwen3_5", kv_dtype="turboquant_4bit_nc"), tmp_path / "engine")
    path = folder / "manifest.json"
    for named in ("auto", "fp8"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"kv_dtype": named}))
        with pytest.raises(Refused, match=f"pages are uint8, which kv_dtype {named} has not"):
            manifest.load(folder)


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
