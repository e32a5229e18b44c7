"""Options with which no engine is built, by checkpoint: what they are refused with, as data."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kit.refused import code_and_field

from hemiola.builder.build import build
from hemiola.builder.options import Options

EVEN, ONNX, RTX = "qwen3_5_divisible", {"target": "onnxruntime"}, {"target": "tensorrt-rtx"}
INT4_HEAD, FP8_INPUTS = {"draft_head": "int4"}, {"act_dtype": "fp8"}
ROWS = [  # checkpoint (conftest.py), options, code, field
    ("qwen3_5", {"tp": 2}, "conflict", "tp"),  # 3 heads
    ("nemotron_h_dense", {"tp": 4}, "conflict", "tp"),  # 2 groups
    (EVEN, {"tp": 4, "draft_vocab": 30}, "conflict", "tp"),
    (EVEN, {"tp": 2, "draft_vocab": 30, "arch": "sm_90"}, "conflict", "tp"),  # 15 ids, an odd number
    ("qwen_fp8+qwen3_5_moe_divisible", {"tp": 4}, "conflict", "tp"),  # 16 inputs, a scale for 32
    (EVEN, {"tp": 3}, "out_of_range", "tp"),
    (EVEN, {"tp": 2} | ONNX, "unsupported", "tp"),
    (EVEN, {"same_bits": True} | ONNX, "unsupported", "same_bits"),
    ("qwen3_5", {"draft_vocab": 320}, "out_of_range", "draft_vocab"),  # all ids there are
    ("qwen3_5", {"draft_vocab": 9, "drafts": "ngram"}, "conflict", "draft_vocab"),
    ("qwen3_5", INT4_HEAD | {"drafts": "ngram"}, "conflict", "draft_head"),
    ("qwen3_5", INT4_HEAD | {"drafts": "none"}, "conflict", "draft_head"),
    ("qwen3_5", INT4_HEAD | ONNX, "unsupported", "draft_head"),
    ("modelopt_mixed+qwen3_5", INT4_HEAD, "conflict", "draft_head"),  # its head is quantised already
    ("qwen3_5", INT4_HEAD | {"quantize_head": "int8"}, "conflict", "draft_head"),
    ("qwen3_5", {"quantize_head": "int8"} | ONNX, "unsupported", "quantize_head"),
    ("modelopt_mixed+qwen3_5", {"quantize_head": "int8"}, "conflict", "quantize_head"),
    ("qwen3_5", FP8_INPUTS, "conflict", "act_dtype"),  # no weight's inputs are FP8
    ("qwen3_5", FP8_INPUTS | {"quantize": "int8"}, "conflict", "act_dtype"),
    ("qwen3_5", FP8_INPUTS | {"arch": "sm_86,sm_90"}, "unsupported", "act_dtype"),
    ("qwen3_5", FP8_INPUTS | ONNX, "unsupported", "act_dtype"),
    ("awq+qwen3_5", {"quantize": "fp8"}, "conflict", "quantize"),  # it is quantised already
    ("qwen3_5", {"quantize": "int4"} | ONNX, "unsupported", "quantize"),
    ("qwen3_5", {"kv_dtype": "fp8"} | ONNX, "unsupported", "kv_dtype"),
    ("qwen3_5", {"chunk_len": 8, "arch": "sm_90"}, "unsupported", "chunk_len"),
    ("nemotron_h_dense", {"chunk_len": 8, "arch": "sm_90"}, "unsupported", "chunk_len"),
    ("qwen3_5", {"arch": ""}, "missing", "arch"),
    ("qwen3_5", {"arch": "sm_90,sm_70"}, "unsupported", "arch"),
    ("qwen3_5", {"arch": "cpu,sm_80"}, "conflict", "arch"),
    ("qwen3_5", {"arch": "sm_90"} | ONNX, "unsupported", "arch"),
    ("qwen3_5", {"arch": "sm_90"} | RTX, "unsupported", "arch"),
    ("qwen3_5", {"arch": "sm_89,cpu"} | RTX, "unsupported", "arch"),
]


@pytest.mark.parametrize(("family", "options", "code", "field"), ROWS, ids=lambda value: str(value)[:60])
def test_no_engine_is_built_and_the_field_is_named(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, family: str, options: dict, code: str, field: str
) -> None:
    source, engine = tiny_checkpoint(family), tmp_path / "engine"
    assert code_and_field(lambda: build(source, engine, Options(**options))) == (code, field)
    assert not engine.exists()
