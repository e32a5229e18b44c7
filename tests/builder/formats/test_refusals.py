"""What is wrong with a quantised checkpoint is said in one line that names the tensor or the key."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import quantised
from kit.quantised import E4M3, RECIPES, Tensors
from safetensors.torch import save_file

from hemiola.builder.checkpoint import Checkpoint
from hemiola.runtime.errors import Refused

SIZE = (64, 96)
BLOCK = quantised.fp8_block((48, 32))
FP8 = RECIPES["qwen_fp8"].config
MODELOPT = RECIPES["modelopt_fp8"].config
NVFP4, NVFP4_CT = RECIPES["modelopt_nvfp4"].config, RECIPES["compressed_nvfp4"].config
W4, ASYM = RECIPES["compressed_w4a16"].config, RECIPES["compressed_w4a16_asym"].config
GPTQ, GPTQ_V2 = RECIPES["gptq"].config, RECIPES["gptq_v2"].config
ZEROS = quantised.int8_asymmetric
W8 = quantised.compressed("int-quantized", 8, "int", "channel", symmetric=False)
ROUND, AWQ = RECIPES["auto_round"].config, RECIPES["awq"].config


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def more(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def minus_nan(codes: torch.Tensor) -> torch.Tensor:
    """In the first place the other of the two."""
    found = codes.view(torch.uint8).clone()
    found[0, 0] = 0xFF
    return found.view(codes.dtype)


def two_middles(zeros: torch.Tensor) -> torch.Tensor:
    """Those of the format's first version, and a word of the second's."""
    return torch.cat((torch.full_like(zeros[:1], -0x77777778), torch.full_like(zeros[1:], 0x77777777)))


def holding(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """With one number changed."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.float().clone()
        changed.view(-1)[-1] = value
        return changed.to(tensor.dtype)

    return change


def shuffled(order: torch.Tensor) -> torch.Tensor:
    return order.flip(0)


TENSORS = [  # writer, config, what is done to the tensors, what is said
    (BLOCK, FP8, without("weight"), "X.weight_scale_inv needs X.weight beside it"),
    (BLOCK, FP8, without("weight_scale_inv"), "X.weight is F8_E4M3 and has no scales beside it"),
    (quantised.packed(4, 32), W4, without("weight_scale"), "needs X.weight_scale beside it"),
    (
        quantised.packed(4, 32, symmetric=False),
        ASYM,
        without("weight_zero_point"),
        "symmetric is false, but X has no weight_zero_point",
    ),
    (ZEROS, W8, without("weight_zero_point"), "symmetric is false, but X has no weight_zero_point"),
    (quantised.gptq(4, 32), GPTQ, without("scales"), "needs X.scales beside it"),
    (quantised.gptq(4, 32), GPTQ, without("qweight"), "tensors g_idx, qzeros, scales, of no format"),
    (
        BLOCK,
        FP8,
        put("weight_scale_inv", lambda s: s[:, :2]),
        r"shape \[2, 2\], its format asks for \[2, 3\]",
    ),
    (
        BLOCK,
        FP8,
        put("weight_scale_inv", lambda s: s.to(E4M3)),
        "weight_scale_inv is F8_E4M3, its format has F32",
    ),
    (BLOCK, FP8, put("weight", lambda w: w.float().bfloat16()), "X.weight is BF16, its format has F8_E4M3"),
    (BLOCK, FP8, put("weight", lambda w: w.float().to(torch.float8_e5m2)), "X.weight is F8_E5M2, its format"),
    (BLOCK, FP8, put("weight", lambda w: w[:, :64]), r"X.weight has shape \[64, 64\]"),
    (
        quantised.fp8_tensor,
        MODELOPT,
        put("weight_scale", lambda s: s.expand(3)),
        r"shape \[3\], its format asks",
    ),
    (
        quantised.packed(4, 32),
        W4,
        put("weight_scale", lambda s: s[:, :2]),
        "does not cut 96 inputs into groups of 32",
    ),
    (
        quantised.packed(4, 32),
        W4,
        put("weight_packed", lambda w: w[:, 1:]),
        "numbers of neither 4 nor 8 bits",
    ),
    (
        quantised.packed(4, 32),
        W4,
        put("weight_shape", lambda s: s.flip(0)),
        r"is \[96, 64\], config.json asks",
    ),
    (
        quantised.packed(4, 32, False),
        ASYM,
        put("weight_zero_point", lambda z: z.T),
        "X.weight_zero_point has shape",
    ),
    (
        quantised.gptq(4, 32),
        GPTQ | {"group_size": 16},
        lambda t: 0,
        "does not cut 96 inputs into groups of 16",
    ),
    (quantised.gptq(4, 32), GPTQ, put("qzeros", lambda z: z.long()), "X.qzeros is I64, its format has I32"),
    (quantised.gptq(4, 32), GPTQ, put("g_idx", shuffled), "X.g_idx orders inputs by activation"),
    (quantised.packed(4, 32), W4, more("weight_g_idx", torch.arange(96).int()), "weight_g_idx orders inputs"),
    (quantised.gptq(4, 32, False), GPTQ | {"sym": False}, lambda t: 0, "first version with sym = false"),
    (quantised.awq(32), AWQ, put("scales", lambda s: s[:1]), "does not cut 96 inputs into groups of 32"),
    (quantised.awq(32), AWQ, put("qweight", lambda w: w[:, :7]), "of no format that this version knows"),
    (
        quantised.nvfp4_modelopt,
        NVFP4,
        put("weight_scale", lambda s: s.float()),
        "weight_scale is F32, its format",
    ),
    (quantised.nvfp4_modelopt, NVFP4, without("weight_scale"), "needs X.weight_scale beside it"),
    (quantised.nvfp4_modelopt, NVFP4, without("weight_scale_2"), "X.weight is U8, its format has F8_E4M3"),
    (
        quantised.nvfp4_compressed,
        NVFP4_CT,
        without("weight_global_scale"),
        "needs X.weight_global_scale beside",
    ),
    (
        quantised.nvfp4_modelopt,
        NVFP4,
        more("pre_quant_scale", torch.ones(96)),
        "pre_quant_scale does not belong to",
    ),
    (ZEROS, W8, put("weight_zero_point", lambda z: z.int()), "weight_zero_point is I32, its format has I8"),
    (
        ZEROS,
        W8,
        put("weight_zero_point", lambda z: z[1:]),
        r"zero_point has shape \[63, 1\], its format asks",
    ),
    (
        quantised.fp8_channel,
        {},
        more("weight_zero_point", torch.zeros(64, 1)),
        "X.weight_zero_point stands beside FP8 codes or scales of blocks",
    ),
    (BLOCK, GPTQ, lambda t: 0, "quant_method is gptq, but the tensors of X are FP8 by blocks"),
    (quantised.int8_channel, MODELOPT, lambda t: 0, "declared as FP8, but X is int8"),
    (quantised.gptq(8, 32), GPTQ, lambda t: 0, "declared as INT4, but X is int8"),
]
CONTENTS = [
    (BLOCK, FP8, put("weight", holding(torch.nan)), r"X.weight holds NaN \(1 of 6144 codes\)"),
    (BLOCK, FP8, put("weight", minus_nan), r"X.weight holds NaN \(1 of 6144 codes\)"),
    (BLOCK, FP8, put("weight_scale_inv", holding(0)), "weight_scale_inv holds 1 of 6 scales that are zero"),
    (BLOCK, FP8, put("weight_scale_inv", holding(2.0**100)), "holds 1 of 6 scales that are .* or beyond"),
    (quantised.fp8_tensor, MODELOPT, put("weight_scale", holding(-1)), "weight_scale holds 1 of 1 scales"),
    (quantised.fp8_channel, {}, put("weight_scale", holding(torch.inf)), "holds 1 of 64 scales"),
    (quantised.packed(4, 32), W4, put("weight_scale", holding(torch.nan)), "holds 1 of 192 scales"),
    (
        quantised.nvfp4_modelopt,
        NVFP4,
        put("weight_scale", holding(0)),
        "X.weight_scale holds 1 of 384 scales",
    ),
    (quantised.nvfp4_modelopt, NVFP4, put("weight_scale", holding(torch.nan)), "holds 1 of 384 scales"),
    (quantised.nvfp4_modelopt, NVFP4, put("weight_scale_2", holding(-0.1)), "weight_scale_2 holds 1 of 1"),
    (
        quantised.nvfp4_compressed,
        NVFP4_CT,
        put("weight_global_scale", holding(0)),
        "weight_global_scale holds",
    ),
    (
        quantised.nvfp4_compressed,
        NVFP4_CT,
        put("weight_global_scale", holding(1e-38)),
        "weight_global_scale holds 1e-38, by which a scale is divided: beyond",
    ),
    (quantised.gptq(4, 32), GPTQ, put("scales", holding(-2)), "X.scales holds 1 of 192 scales"),
    (quantised.awq(32), AWQ, put("scales", holding(0)), "X.scales holds 1 of 192 scales"),
    (
        quantised.gptq(4, 32, False, 2),
        GPTQ,
        lambda t: 0,
        "but config.json says sym = true; all would be 8 or 7",
    ),
    (
        quantised.gptq(4, 32),
        GPTQ,
        put("qzeros", two_middles),
        r"has zero points \[7, 8\], but config.json says",
    ),
]
DECLARED = [  # configs that are refused whatever the tensors are
    (GPTQ | {"desc_act": True}, None, "desc_act = True"),
    (GPTQ | {"bits": 3}, None, "bits = 3"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None, "quant_method = 'bitsandbytes'"),
    ({"quant_method": "mxfp4"}, None, "quant_method = 'mxfp4'"),
    (FP8 | {"fmt": "e5m2"}, None, "fmt = 'e5m2'"),
    (AWQ | {"version": "gemv"}, None, "version = 'gemv'"),
    (W4 | {"transform_config": {"config_groups": {"a": {}}}}, None, "transform_config = "),
    (W4 | {"sparsity_config": {"format": "sparse"}}, None, "sparsity_config = "),
    (W4 | {"format": "mxfp4-pack-quantized"}, None, "format = 'mxfp4-pack-quantized'"),
    (NVFP4 | {"quant_algo": "NVFP4_AWQ"}, None, "quant_algo = 'NVFP4_AWQ'"),
    (None, {"quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'"),
    (None, {}, "hf_quant_config.json does not say how"),
    (FP8 | {"weight_block_size": [0, 128]}, None, "weight_block_size is [0, 128], expected two numbers"),
    (FP8 | {"weight_block_size": [128]}, None, "weight_block_size is [128], expected two numbers"),
    (FP8 | {"weight_block_size": 128}, None, "weight_block_size is 128, expected two numbers"),
    (W4 | {"config_groups": {"a": 1}}, None, "config_groups is 1, expected an object of objects"),
    (W4 | {"config_groups": {"a": {"weights": 4}}}, None, "weights is 4, expected an object"),
    (W4 | {"config_groups": {"a": {"weights": {"num_bits": [4]}}}}, None, "num_bits is [4], expected a"),
    (NVFP4 | {"quant_algo": ["FP8"]}, None, "quant_algo is ['FP8'], expected a word"),
    (None, [1], "hf_quant_config.json: quantization is [1], expected an object"),
    (None, {"quantized_layers": {"a": None}}, "quantized_layers is None, expected an object of objects"),
    (NVFP4, {"quant_algo": "FP8"}, "declares the kinds NVFP4, hf_quant_config.json FP8; correct one"),
    (
        NVFP4,
        {"quant_algo": "NVFP4", "group_size": 32},
        "declares the group sizes 16, hf_quant_config.json 32",
    ),
]


def tensors_of(writer: quantised.Writer) -> Tensors:
    made = writer(torch.randn(SIZE, generator=torch.Generator().manual_seed(0)))
    assert made is not None
    return made.tensors.copy()


@pytest.mark.parametrize("writer, config, change, said", TENSORS, ids=[row[3][:60] for row in TENSORS])
def test_tensors_that_make_no_weight_are_refused_before_any_is_read(
    writer: quantised.Writer, config: Any, change: Any, said: str, alone: Callable[..., Checkpoint]
) -> None:
    change(tensors := tensors_of(writer))
    checkpoint = alone(tensors, config)
    with pytest.raises(Refused, match=said) as refused:
        checkpoint.matrix("X.weight", *SIZE)
    assert "\n" not in str(refused.value) and "; " in str(refused.value)


@pytest.mark.parametrize("writer, config, change, said", CONTENTS, ids=[row[3][:60] for row in CONTENTS])
def test_contents_that_are_no_numbers_are_refused_when_they_are_read(
    writer: quantised.Writer, config: Any, change: Any, said: str, alone: Callable[..., Checkpoint]
) -> None:
    change(tensors := tensors_of(writer))
    lazy = alone(tensors, config).matrix("X.weight", *SIZE)
    with pytest.raises(Refused, match=said):
        lazy.read()


@pytest.mark.parametrize("config, beside, said", DECLARED, ids=[row[2][:60] for row in DECLARED])
def test_a_config_that_declares_something_else_is_refused(
    config: Any, beside: Any, said: str, alone: Callable[..., Checkpoint]
) -> None:
    beside = None if beside is None else {"quantization": beside}
    with pytest.raises(Refused, match=re.escape(said)) as refused:
        alone({"weight": torch.zeros(SIZE)}, config, beside)
    assert "\n" not in str(refused.value)


def test_scales_of_what_may_not_be_quantised_are_refused(alone: Callable[..., Checkpoint]) -> None:
    checkpoint = alone(tensors_of(BLOCK) | {"k_scale": torch.tensor(1.0)}, FP8)
    with pytest.raises(Refused, match=r"X.weight is F8_E4M3, not one of BF16.* only weights of dense"):
        checkpoint.tensor("X.weight", *SIZE)
    with pytest.raises(Refused, match=r"has X.weight_scale_inv, but no layer"):
        checkpoint.refuse_leftovers("$.")


STACKS = [  # of three experts
    (
        quantised.nvfp4_modelopt,
        put("weight_scale_2", lambda s: s[:2]),
        r"weight_scale_2 has shape \[2, 2\], which is no stack of 3",
    ),
    (
        quantised.nvfp4_compressed,
        put("weight_global_scale", lambda s: s.repeat(1, 2)),
        r"weight_global_scale\[0\] has shape \[4\], its format asks for \[\]",
    ),
    (  # as Llama 4 has it, which multiplies from the other side
        quantised.nvfp4_modelopt,
        put("weight", lambda w: w.transpose(1, 2)),
        r"X_gate_up_proj.weight\[0\] has shape \[48, 64\], its format asks for \[64, 48\]",
    ),
    (
        quantised.packed(4, 32),
        put("weight_shape", lambda s: s + 1),
        r"is \[33, 97, 33, 97\], config.json asks",
    ),
    (quantised.packed(4, 32), without("weight_scale"), r"needs X_gate_up_proj\[0\].weight_scale beside it"),
    (
        quantised.fp8_tensor,
        put("weight_scale", lambda s: s * -1),
        r"X_gate_up_proj.weight_scale\[0\] holds 2",
    ),
]


@pytest.mark.parametrize("writer, change, said", STACKS, ids=[row[2][:60] for row in STACKS])
def test_a_stack_that_is_none_is_refused(
    writer: quantised.Writer, change: Any, said: str, tmp_path: Path, alone: Callable[..., Checkpoint]
) -> None:
    weights = torch.randn(3, *SIZE, generator=torch.Generator().manual_seed(0))
    made = quantised.stacked(writer, weights, 2)
    assert made is not None
    change(tensors := made.tensors.copy())
    alone({}, {})
    named = {f"X_gate_up_proj.{end}": tensor.contiguous() for end, tensor in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    with pytest.raises(Refused, match=said):
        Checkpoint(tmp_path).matrix("X_gate_up_proj", 3, *SIZE).read()


def test_matrices_in_one_word_are_refused(tmp_path: Path, alone: Callable[..., Checkpoint]) -> None:
    """Zero points of gate and up: behind each other, packed apart, they would be read as those of others."""
    weights = torch.randn(3, 30, 64, generator=torch.Generator().manual_seed(0))
    made = quantised.stacked(quantised.packed(4, 32, False), weights, 2)
    assert made is not None
    alone({}, ASYM)
    save_file(
        {f"gate_up_proj_{end}": each for end, each in made.tensors.items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(Refused, match="packs 2 matrices of 15 outputs, which fill no whole words"):
        Checkpoint(tmp_path).matrix("gate_up_proj", 3, 30, 64)


def test_lists_of_modules_decide_nothing(alone: Callable[..., Checkpoint]) -> None:
    """A weight whose config excludes it, and one whose config does not (mtp.fc): tensors tell."""
    quantised_ = alone(tensors_of(BLOCK), FP8 | {"modules_to_not_convert": ["X"]}).matrix("X.weight", *SIZE)
    assert quantised_.layout is not None
    plain = alone({"weight": torch.zeros(SIZE)}, FP8 | {"modules_to_not_convert": []})
    assert plain.matrix("X.weight", *SIZE).layout is None


def test_a_block_of_a_million_rows_takes_memory_for_them(alone: Callable[..., Checkpoint]) -> None:
    """8 TB for a matrix of 64 rows."""
    tensors = tensors_of(quantised.fp8_block((64, 32)))
    read = [
        alone(tensors, FP8 | {"weight_block_size": [height, 32]}).matrix("X.weight", *SIZE).read()
        for height in (64, 2**40)
    ]
    assert torch.equal(*read)
