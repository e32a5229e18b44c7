"""What nothing multiplies is refused by name; configs as published ones have them, their lists cut short."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hemiola.builder.build import build
from hemiola.builder.formats import METHODS
from hemiola.builder.formats.declared import is_about_pages, read_declared
from hemiola.builder.options import Options
from hemiola.runtime.errors import Refused

QWEN_FP8 = {  # Qwen/Qwen3-Next-80B-A3B-Instruct-FP8
    "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip
MODELOPT_FP8 = {  # nvidia's Nemotron-3-Nano FP8: config.json
    "ignore": ["lm_head"], "quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.40.0"},
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "quant_method": "modelopt",
}  # fmt: skip
FOUR = {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"}
GROUPS = {"group_0": {"input_activations": FOUR, "weights": FOUR, "targets": ["Linear"]}}
NVFP4 = {"config_groups": GROUPS, "ignore": ["lm_head"], "quant_algo": "NVFP4", "quant_method": "modelopt"}
COMPRESSED = {"config_groups": GROUPS, "format": "nvfp4-pack-quantized", "quant_method": "compressed-tensors"}
MIXED = {  # Nemotron-3-Super: hf_quant_config.json
    "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8",
    "quantized_layers": {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}},
}  # fmt: skip
AUTO_FP8 = {"activation_scheme": "static", "kv_cache_scheme": "static", "quant_method": "fp8"}
AWQ = {"bits": 4, "group_size": 128, "quant_method": "awq", "zero_point": True}
NONE_IS = "by its config, but no tensor is; use"


@pytest.mark.parametrize(
    ("config", "beside", "arch", "expected"),
    [
        (QWEN_FP8, None, "cpu", f"weights are FP8 {NONE_IS}"),
        (QWEN_FP8, None, "sm_80", f"weights are FP8 {NONE_IS}"),
        (MODELOPT_FP8, None, "sm_89", f"weights are FP8 {NONE_IS}"),
        (NVFP4, None, "sm_120", f"weights are NVFP4 {NONE_IS}"),
        (
            COMPRESSED,
            None,
            "onnxruntime",
            "which --target onnxruntime does not multiply; build for --target torch",
        ),
        (None, MIXED, "onnxruntime", "weights are FP8 and NVFP4, which --target onnxruntime"),
        (AUTO_FP8, None, "cpu", f"weights are FP8 {NONE_IS}"),
        (AWQ, None, "sm_90", f"weights are INT4 {NONE_IS}"),
    ],
)
def test_it_is_refused_with_the_way_out(
    config: Any,
    beside: Any,
    arch: str,
    expected: str,
    tiny_checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(tiny_checkpoint("qwen3_5"), tmp_path / "checkpoint")
    content = json.loads((folder / "config.json").read_text())
    if config:
        content["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(content))
    if beside:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    options = {"target": arch} if arch == "onnxruntime" else {"arch": [arch]}
    with pytest.raises(Refused) as refused:
        build(folder, tmp_path / "engine", Options(**options))
    assert expected in str(refused.value) and str(refused.value).endswith("use the bf16 checkpoint")
    assert "\n" not in str(refused.value) and not (tmp_path / "engine").exists()


def test_keys_and_values_alone_are_no_quantised_weights() -> None:
    """tests/builder/test_kv_dtype.py builds such a checkpoint."""
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    alone = {"kv_cache_scheme": scheme, "quant_method": "compressed-tensors", "config_groups": {}}
    assert is_about_pages(alone) and is_about_pages({"quant_algo": None, "kv_cache_quant_algo": "FP8"})
    others = [{**alone, "kv_cache_scheme": scheme | {"num_bits": 4}}, {**alone, "config_groups": GROUPS}]
    others += [{"quant_method": method, "kv_cache_scheme": scheme} for method in ("fp8", "awq")]
    assert not any(map(is_about_pages, [*others, AUTO_FP8, QWEN_FP8, MODELOPT_FP8, NVFP4, MIXED, AWQ, {}]))


def test_a_file_that_says_nothing_is_no_word_about_pages() -> None:
    """Of no declaration at all, all were about pages: the checkpoint was read as if it were not quantised."""
    with pytest.raises(Refused, match=r"weights are quantised \(hf_quant_config.json does not say how\)"):
        read_declared("config.json", {}, {"quantization": {}}, METHODS)
