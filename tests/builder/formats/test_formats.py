"""Every format: the numbers that its makers' readers find, bit for bit, whatever a family does with rows."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import quantised
from kit.checkpoints import fused_experts
from kit.ops import same_bits
from kit.quantised import MIXED_LAYERS, NEVER, RECIPES, Recipe, Tensors, Written
from safetensors.torch import load_file, save_file

from hemiola.builder import models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.lazy import Lazy
from hemiola.plugins import references

Get = Callable[..., Path]
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe_experts", "nemotron_h_dense", "nemotron_h_moe")
CASES = [(recipe, family) for recipe in RECIPES for family in FAMILIES]
STACKS = ("qwen_fp8", "modelopt_fp8", "modelopt_nvfp4", "compressed_nvfp4", "compressed_w4a16_asym")
CASES += [(recipe, "qwen3_5_moe") for recipe in STACKS]
SIZES = [(256, 192), (192, 256), (80, 320)]
WRITERS: dict[str, tuple[quantised.Writer, dict[str, Any]]] = {
    "fp8 block": (quantised.fp8_block(), quantised.QWEN_FP8 | {"weight_block_size": [128, 128]}),
    "fp8 block, fp32": (quantised.fp8_block(dtype=torch.float32), {}),
    "modelopt fp8": (quantised.fp8_tensor, RECIPES["modelopt_fp8"].config),
    "modelopt nvfp4": (quantised.nvfp4_modelopt, RECIPES["modelopt_nvfp4"].config),
    "ct nvfp4": (quantised.nvfp4_compressed, RECIPES["compressed_nvfp4"].config),
    "ct fp8": (quantised.fp8_channel, RECIPES["compressed_fp8"].config),
    "ct int8": (quantised.int8_channel, RECIPES["compressed_int8"].config),
    "ct int8 asym": (
        quantised.int8_asymmetric,
        quantised.compressed("int-quantized", 8, "int", "channel", symmetric=False),
    ),
    "ct w4 g32": (quantised.packed(4, 32), RECIPES["compressed_w4a16"].config),
    "ct w4 g128 ragged": (
        quantised.packed(4, 128),
        quantised.compressed("pack-quantized", 4, "int", "group", 128),
    ),
    "ct w4 g32 asym": (quantised.packed(4, 32, False), RECIPES["compressed_w4a16_asym"].config),
    "ct w8 channel": (quantised.packed(8, 0), RECIPES["compressed_w8a16"].config),
    "gptq": (quantised.gptq(4, 32), RECIPES["gptq"].config),
    "gptq g16 v2 8 bits": (quantised.gptq(8, 16, False, 2), RECIPES["gptq_v2"].config),
    "auto-round": (quantised.gptq(4, 32, ordered=False), RECIPES["auto_round"].config),
    "awq": (quantised.awq(32), RECIPES["awq"].config),
}


EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.*)")


def as_it_is(tensors: Tensors) -> Tensors:
    return tensors


def stack_mtp(tensors: Tensors) -> Tensors:
    """The experts of the MTP head lie in one tensor, those of the trunk do not."""
    mtp = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    return {name: tensor for name, tensor in tensors.items() if name not in mtp} | fused_experts(mtp)


def stack_relu2(tensors: Tensors) -> Tensors:
    """Experts of NemotronH as transformers has them in memory, and llm-compressor in files."""
    found = {name: EXPERT.fullmatch(name) for name in tensors}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, match in found.items():
        if match:
            stacks.setdefault(match[1] + match[3], {})[int(match[2])] = tensors[name]
    rest = {name: tensors[name] for name, match in found.items() if not match}
    return rest | {name: torch.stack([each[n] for n in range(len(each))]) for name, each in stacks.items()}


def scale_pages(tensors: Tensors) -> Tensors:
    scales = {"k_proj.k_scale": torch.tensor(0.5), "v_proj.v_scale": torch.tensor(0.25)}
    return tensors | {f"backbone.layers.2.mixer.{name}": scale for name, scale in scales.items()}


def modelopt(algorithm: str, *rules: tuple[str, quantised.Writer | None]) -> Recipe:
    """With pages in FP8, as NVIDIA's releases say; the first rule that fits decides."""
    pages = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    beside = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
    if algorithm == "MIXED_PRECISION":
        beside["quantized_layers"] = MIXED_LAYERS
    own = {"quant_method": "modelopt", "quant_algo": algorithm}
    return Recipe(own | pages, (NEVER, *rules), {"quantization": beside})


NVFP4, FP8 = quantised.nvfp4_modelopt, quantised.fp8_tensor
RELEASES: dict[str, tuple[str, Recipe, Callable[[Tensors], Tensors]]] = {
    "Qwen3.6-35B-A3B mixed": ("qwen3_5_moe_experts", RECIPES["modelopt_mixed"], stack_mtp),
    "Qwen3.5-122B": (
        "qwen3_5_moe_experts",
        modelopt("NVFP4", ("mtp", None), (r"\.experts", NVFP4)),
        as_it_is,
    ),
    "Nemotron-3-Nano": (  # a Mamba layer before attention stays
        "nemotron_h_moe",
        modelopt("NVFP4", (r"mtp|layers\.0", None), (r"expert|(in|out)_proj", NVFP4)),
        as_it_is,
    ),
    "NemotronH of llm-compressor, stacked": (
        "nemotron_h_moe",
        RECIPES["compressed_nvfp4"],
        stack_relu2,
    ),
    "Nemotron-3-Super mixed": (  # in_proj and out_proj of one layer differ; scales for keys and values
        "nemotron_h_moe",
        modelopt(
            "MIXED_PRECISION",
            (r"mtp|layers\.[03].*out_proj", None),
            (r"expert", NVFP4),
            (r"(in|out|o)_proj|layers\.1.*fc", FP8),
        ),
        scale_pages,
    ),
}


def random(num_outputs: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    """Weights whose groups have scales far apart, one of them zeros."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, num_inputs, generator=rng)
    weight *= torch.logspace(-3, 1, num_outputs)[:, None]
    weight[3, :32] = 0
    return weight


def written(name: str, size: tuple[int, int]) -> Written:
    made = WRITERS[name][0](random(*size))
    assert made is not None
    return made


def test_zero_points_in_one_row_of_words_are_a_traceback(alone: Callable[..., Checkpoint]) -> None:
    """Of eight outputs: turned around they were dense to torch, and not to its view as bytes."""
    made = written("ct w4 g32 asym", (8, 64))
    lazy = alone(made.tensors, WRITERS["ct w4 g32 asym"][1]).matrix("X.weight", 8, 64)
    assert same_bits(lazy.read(), made.numbers)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", WRITERS)
def test_the_numbers_are_those_of_the_format(
    name: str, size: tuple[int, int], alone: Callable[..., Checkpoint]
) -> None:
    made = written(name, size)
    lazy = alone(made.tensors, WRITERS[name][1]).matrix("X.weight", *size)
    assert lazy.layout is not None and same_bits(lazy.read(), made.numbers)
    order = torch.randperm(size[0], generator=torch.Generator().manual_seed(1))[:50]
    assert same_bits(lazy.take(lambda rows: rows[order]).read(), made.numbers[order])


SPELLINGS: dict[str, Callable[[str], str]] = {  # of the tensors of stacked experts X
    "X.weight_scale": lambda end: f"X.{end}",
    "X_scale": lambda end: "X" if end == "weight" else f"X_{end.removeprefix('weight_')}",
    "X_weight_scale": lambda end: "X" if end == "weight" else f"X_{end}",
}


@pytest.mark.parametrize("name", WRITERS)
def test_stacked_experts_have_the_numbers_of_each(
    name: str, tmp_path: Path, alone: Callable[..., Checkpoint]
) -> None:
    """Whatever their makers call the tensors; gate and up, written alone, keep scales of their own."""
    weights = torch.stack([random(256, 96, seed) * 2.0**seed for seed in range(3)])
    for spelling, num_joined in zip(SPELLINGS.values(), (2, 1, 1 if "block" in name else 2), strict=True):
        if "block" in name and num_joined == 2:
            weights = weights[:, :128].repeat(1, 2, 1)  # blocks that belong to one of both
        made = quantised.stacked(WRITERS[name][0], weights, num_joined)
        assert made is not None
        stem = "gate_up_proj" if num_joined == 2 else "down_proj"
        alone({}, WRITERS[name][1])
        named = {spelling(end).replace("X", stem, 1): part.contiguous() for end, part in made.tensors.items()}
        save_file(named, tmp_path / "model.safetensors")
        checkpoint = Checkpoint(tmp_path)
        lazy = checkpoint.matrix(stem, 3, 256, 96)
        assert lazy.layout is not None and same_bits(lazy.read(), made.numbers)
        assert same_bits(lazy.take(lambda rows: rows[70:200:3], 1).read(1, 2), made.numbers[1:2, 70:200:3])
        checkpoint.refuse_leftovers("$.")


@pytest.mark.parametrize("recipe, family", CASES, ids=map("-".join, CASES))
def test_a_family_finds_the_numbers_of_the_twin(
    recipe: str, family: str, tiny_checkpoint: Get, tmp_path: Path
) -> None:
    """Rows that are interleaved, joined and stacked; layers of which a part is quantised; MTP heads."""
    copies = quantised.quantise(tiny_checkpoint(family), tmp_path, RECIPES[recipe])
    ours, theirs = (loaded(copy) for copy in (copies.quantised, copies.twin))
    assert any(lazy.layout for lazy in ours.values())
    assert same_bits(numbers(ours), numbers(theirs))


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_is_read_as_its_maker_mixed_it(release: str, tiny_checkpoint: Get, tmp_path: Path) -> None:
    family, recipe, change = RELEASES[release]
    copies = quantised.quantise(tiny_checkpoint(family), tmp_path, recipe)
    for copy in (copies.quantised, copies.twin):
        path = copy / "model.safetensors"
        save_file(change(load_file(path)), path)
    ours, theirs = (loaded(copy, "fp8") for copy in (copies.quantised, copies.twin))
    kinds = {lazy.layout.kind if lazy.layout else "plain" for lazy in ours.values()}
    assert kinds == ({"plain", "e2m1", "e4m3"} if "mixed" in release else {"plain", "e2m1"})
    assert same_bits(numbers(ours), numbers(theirs))


def numbers(weights: dict[str, Lazy]) -> torch.Tensor:
    """All of them behind each other, which does not depend on how rows are cut into weights."""
    return torch.cat([lazy.read().float().flatten() for lazy in weights.values()])


def loaded(folder: Path, kv_dtype: str = "auto") -> dict[str, Lazy]:
    model = models.load(Checkpoint(folder), references, chunk_len=16, max_len=64, kv_dtype=kv_dtype)
    assert model.draft is not None
    return model.weights(model.draft) | model.weights(model.trunk)


COMPRESSED = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed"
)


@COMPRESSED
@pytest.mark.parametrize("size", SIZES[:2], ids=str)
@pytest.mark.parametrize("name", [n for n in WRITERS if n.startswith("ct ") and "ragged" not in n])
def test_compressed_tensors_reads_the_same_numbers(
    name: str, size: tuple[int, int], alone: Callable[..., Checkpoint]
) -> None:
    """In fp32: with scales of bf16 it would round products to bf16."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    made, config = written(name, size), WRITERS[name][1]
    args = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    wide = {end: tensor.float() if end == "weight_scale" else tensor for end, tensor in made.tensors.items()}
    if name == "ct nvfp4":
        codes = unpack_fp4_from_uint8(wide["weight_packed"], *size, dtype=torch.float32)
        scales = wide["weight_scale"], wide["weight_global_scale"]
        theirs = dequantize(codes, scales[0], args=args, global_scale=scales[1], dtype=torch.float32)
    else:
        compressor = BaseCompressor.get_value_from_registry(config["format"])
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        theirs = compressor.decompress(wide, scheme)["weight"]
    lazy = alone(made.tensors, config).matrix("X.weight", *size)
    assert theirs.dtype is torch.float32 and same_bits(lazy.read(), theirs)


@pytest.mark.parametrize("size", [(256, 128), (128, 384)], ids=str)
def test_transformers_reads_the_same_fp8_numbers(
    size: tuple[int, int], alone: Callable[..., Checkpoint]
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    made = written("fp8 block, fp32", size)
    theirs = Fp8Dequantize(None)._dequantize_one(made.tensors["weight"], made.tensors["weight_scale_inv"])
    lazy = alone(made.tensors, {}).matrix("X.weight", *size)
    assert same_bits(lazy.read(), theirs.float())
