"""Config reads, lazy tensors, and the checks that need no model."""

import json
import math
from pathlib import Path

import pytest
import torch
from kit import checkpoints
from safetensors.torch import save_file

from hemiola.builder.checkpoint import Checkpoint, Config, Lazy, join
from hemiola.runtime.errors import Refused


def folder_with(path: Path, tensors: dict[str, torch.Tensor], shards: int = 1, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    checkpoints.write_tensors(path, tensors, shards)
    return path


def test_reads_are_typed() -> None:
    cfg = Config({"n": 3, "x": 1, "flag": True, "words": ["a"], "empty": None}, "config.json")
    assert cfg.read("n", int) == 3 and cfg.read("x", float) == 1.0 and cfg.read("words", list[str]) == ["a"]
    assert cfg.read("empty", int, 5) == 5 and cfg.read("missing", str, "d") == "d"
    for key, kind in (("flag", int), ("n", str), ("n", bool), ("words", list[int]), ("words", str)):
        with pytest.raises(Refused, match=f"config.json: {key} is .*expected"):
            cfg.read(key, kind)
    with pytest.raises(Refused, match=r"config.json has no empty"):
        cfg.read("empty", int)


def test_require_accepts_the_default_when_absent_and_nothing_of_another_type() -> None:
    cfg = Config({"act": "gelu", "bias": 0, "none": None}, "config.json")
    cfg.require("missing", False)
    cfg.require("none", None, "swish")
    for key, accepted in (("act", "silu"), ("bias", False), ("none", "silu")):
        with pytest.raises(Refused, match=f"{key} = .* is not supported, only {accepted!r}"):
            cfg.require(key, accepted)


@pytest.mark.parametrize("text", ['{"__float__": "Infinity"}', "Infinity", '"Infinity"'])
def test_every_spelling_of_infinity(text: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    (folder / "config.json").write_text(f'{{"time_step_limit": [0.0, {text}]}}')
    assert Checkpoint(folder).config.read("time_step_limit", list[float]) == [0.0, math.inf]


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_keep_their_dtypes(shards: int, tmp_path: Path) -> None:
    stored = {
        "a": torch.randn(2, 3).bfloat16(),
        "b": torch.randn(4).half(),
        "c": torch.randn(1, 2),
        "d": torch.randn(3, 3).bfloat16(),
    }
    checkpoint = Checkpoint(folder_with(tmp_path, stored, shards))
    for name, tensor in stored.items():
        lazy = checkpoint.tensor(name, *tensor.shape)
        assert lazy.dtype == tensor.dtype and torch.equal(lazy.read(), tensor)


def test_joined_tensors_take_the_smallest_dtype_that_holds_all() -> None:
    bf16, fp16, fp32 = (
        Lazy.of(torch.ones(2, 3, dtype=d)) for d in (torch.bfloat16, torch.float16, torch.float32)
    )
    assert join([bf16, bf16]).dtype == torch.bfloat16
    assert join([bf16, fp32]).dtype == join([bf16, fp16]).dtype == torch.float32
    assert join([bf16, bf16]).shape == join([bf16, bf16]).read().shape == (4, 3)
    assert join([bf16, fp32], torch.stack).shape == (2, 2, 3)
    doubled = bf16.map(lambda w: 2 * w.float())
    assert doubled.dtype == torch.float32 and torch.equal(doubled.read(), torch.full((2, 3), 2.0))


def test_leftovers_are_named(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.zeros(1) for i in range(7)} | {"model.visual.x": torch.zeros(1)}
    checkpoint = Checkpoint(folder_with(tmp_path, tensors, architectures=["SomeModel"]))
    checkpoint.tensor("t0", 1)
    with pytest.raises(Refused, match=r"does not know: t1, t2, t3, t4 and 2 more"):
        checkpoint.refuse_leftovers(r"model\.visual\.")


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {}, eos_token_id=7, text_config={"eos_token_id": [8, 9]})
    checkpoint = Checkpoint(folder)
    text = checkpoint.config.section("text_config")
    assert checkpoint.eos_ids(text) == (8, 9)
    assert checkpoint.eos_ids(checkpoint.config) == (7,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    assert checkpoint.eos_ids(text) == (2, 11)
    (folder / "generation_config.json").write_text("{}")
    assert checkpoint.eos_ids(text) == (8, 9)


def test_a_tensor_that_the_index_puts_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)}, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, second = index["weight_map"]["a"], index["weight_map"]["b"]
    index["weight_map"] = {"a": second, "b": first}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Refused, match=r"says that a is in .*, but it is not"):
        Checkpoint(folder)


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    save_file({"w": torch.zeros(2, dtype=torch.int8)}, folder / "model.safetensors")
    with pytest.raises(Refused, match="w is I8, not one of BF16, F16, F32"):
        Checkpoint(folder).tensor("w", 2)
