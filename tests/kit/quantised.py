"""Quantised copies of tiny checkpoints, written as the makers of each format do, and their fp32 twins.

A writer rounds a weight [O, F] to nearest and returns the tensors that stand for it, by the ends of their
names, with the numbers that a reader must find. Each format's formulas stand here, not those of builder/.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
E4M3 = torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Written(NamedTuple):
    tensors: Tensors  # by the ends of their names
    numbers: torch.Tensor  # fp32


Writer = Callable[[torch.Tensor], Written | None]  # None: this weight stays as it is


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(E4M3)


def spread(scales: torch.Tensor, width: int, num: int, dim: int = -1) -> torch.Tensor:
    return scales.repeat_interleave(width, dim).narrow(dim, 0, num)


def fp8_block(
    block: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.bfloat16, end: str = "weight_scale_inv"
):
    """Qwen's; of several stacked matrices, too."""

    def write(w: torch.Tensor) -> Written:
        (high, wide), (num_outputs, num_inputs) = block, w.shape[-2:]
        padded = torch.nn.functional.pad(w, (0, -num_inputs % wide, 0, -num_outputs % high)).abs()
        tiles = padded.unflatten(-1, (-1, wide)).unflatten(-3, (-1, high))
        scales = (tiles.amax((-1, -3)) / 448).clamp(min=1e-4).to(dtype)
        full = spread(spread(scales.float(), high, num_outputs, -2), wide, num_inputs)
        codes = to_e4m3(w / full)
        return Written({"weight": codes, end: scales}, codes.float() * full)

    return write


def fp8_tensor(w: torch.Tensor) -> Written:
    """ModelOpt's FP8."""
    scale = w.abs().amax() / 448
    codes = to_e4m3(w / scale)
    return Written({"weight": codes, "weight_scale": scale, "input_scale": scale * 3}, codes.float() * scale)


def fp8_channel(w: torch.Tensor) -> Written:
    """compressed-tensors' W8A8, with dynamic activations."""
    scale = (w.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = to_e4m3(w / scale.float())
    return Written({"weight": codes, "weight_scale": scale}, codes.float() * scale.float())


def int8_channel(w: torch.Tensor) -> Written:
    scale = (w.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (w / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return Written({"weight": codes, "weight_scale": scale}, codes.float() * scale.float())


def int8_asymmetric(w: torch.Tensor) -> Written:
    """With zero points, which compressed-tensors does not pack here."""
    low, high = w.amin(1, keepdim=True).clamp(max=0), w.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-6).bfloat16()
    zeros = (-128 - low / scale.float()).round().clamp(-128, 127).to(torch.int8)
    codes = (w / scale.float() + zeros).round().clamp(-128, 127).to(torch.int8)
    tensors = {"weight": codes, "weight_scale": scale, "weight_zero_point": zeros}
    return Written(tensors, (codes.float() - zeros.float()) * scale.float())


def _nvfp4(
    w: torch.Tensor, divides: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    if w.shape[1] % 16:
        return None
    groups = w.unflatten(1, (-1, 16))
    whole = w.abs().amax() / 6 / 448  # what multiplies
    whole = (1 / whole) if divides else whole
    scales = groups.abs().amax(-1) / 6 * whole if divides else groups.abs().amax(-1) / 6 / whole
    scales = to_e4m3(scales.clamp(min=2.0**-9))
    full = scales.float() / whole if divides else scales.float() * whole
    nearest = (groups / full[..., None]).unsqueeze(-1) - E2M1
    codes = nearest.abs().argmin(-1).flatten(1).to(torch.uint8)
    numbers = E2M1[codes.long()] * spread(full, 16, w.shape[1])
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales, whole, numbers


def nvfp4_modelopt(w: torch.Tensor) -> Written | None:
    if (made := _nvfp4(w, False)) is None:
        return None
    packed, scales, whole, numbers = made
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}
    return Written(tensors | {"input_scale": torch.tensor(0.01)}, numbers)


def nvfp4_compressed(w: torch.Tensor) -> Written | None:
    if (made := _nvfp4(w, True)) is None:
        return None
    packed, scales, whole, numbers = made
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole.view(1)}
    return Written(tensors, numbers)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers from 0 up [..., n] as int32, the first in the lowest bits."""
    num = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % num)).unflatten(-1, (-1, num))
    words = (padded << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


class Rounded(NamedTuple):
    codes: torch.Tensor  # [O, F] from 0 up
    scales: torch.Tensor  # [O, G]
    zeros: torch.Tensor  # [O, G] from 0 up
    numbers: torch.Tensor


def _integers(w: torch.Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> Rounded:
    """Of whole groups, or with a last one that is shorter."""
    num_inputs, most = w.shape[1], 2**bits - 1
    groups = torch.nn.functional.pad(w, (0, -num_inputs % group)).unflatten(1, (-1, group))
    if symmetric:
        scales = (groups.abs().amax(-1) / (most // 2)).clamp(min=1e-4).to(dtype)
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / most).clamp(min=1e-4).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, most).long()
    s, z = (spread(each.float(), group, num_inputs) for each in (scales, zeros))
    codes = (w / s + z).round().clamp(0, most)
    return Rounded(codes.long(), scales, zeros, (codes - z) * s)


def packed(bits: int, group: int, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16) -> Writer:
    """compressed-tensors' pack-quantized; group 0: a scale for a row."""

    def write(w: torch.Tensor) -> Written:
        made = _integers(w, bits, group or w.shape[1], symmetric, dtype)
        tensors = {"weight_packed": _words(made.codes, bits), "weight_scale": made.scales}
        tensors["weight_shape"] = torch.tensor(w.shape)
        if not symmetric:
            tensors["weight_zero_point"] = _words(made.zeros.T.contiguous(), bits).T.contiguous()
        return Written(tensors, made.numbers)

    return write


def gptq(bits: int, group: int, symmetric: bool = True, version: int = 1, ordered: bool = True) -> Writer:
    """AutoRound's has no g_idx."""

    def write(w: torch.Tensor) -> Written | None:
        size = group or w.shape[1]
        if w.shape[1] % size or w.shape[1] % (32 // bits) or w.shape[0] % (32 // bits):
            return None
        made = _integers(w, bits, size, symmetric, torch.float16)
        tensors = {
            "qweight": _words(made.codes, bits).T.contiguous(),
            "scales": made.scales.T.contiguous(),
            "qzeros": _words((made.zeros - int(version == 1)).T.contiguous(), bits),
        }
        if ordered:
            tensors["g_idx"] = (torch.arange(w.shape[1]) // size).int()
        return Written(tensors, made.numbers)

    return write


def awq(group: int) -> Writer:
    def write(w: torch.Tensor) -> Written | None:
        if w.shape[1] % group or w.shape[0] % 8:
            return None
        made = _integers(w, 4, group, False, torch.float16)

        def words(codes: torch.Tensor) -> torch.Tensor:
            return _words(codes.T.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)

        tensors = {"qweight": words(made.codes), "qzeros": words(made.zeros)}
        return Written(tensors | {"scales": made.scales.T.contiguous()}, made.numbers)

    return write


def stacked(write: Writer, w: torch.Tensor, num_joined: int) -> Written | None:
    """Experts [E, O, F], of each as many matrices behind each other, written one by one and put together as
    llm-compressor does. X is gate_up_proj or the like."""
    written = [[write(part) for part in matrix.chunk(num_joined)] for matrix in w]
    parts = [[part for part in matrix if part is not None] for matrix in written]
    if parts != written:
        return None

    def together(end: str) -> torch.Tensor:
        each = [torch.stack([matrix[n].tensors[end] for matrix in parts]) for n in range(num_joined)]
        if each[0].dim() < 3 and each[0].numel() == len(w):
            return torch.stack([numbers.flatten() for numbers in each], -1)
        if end == "g_idx":
            return each[0]
        return torch.cat(each, -1 if end in ("qweight", "scales", "qzeros", "weight_shape") else 1)

    numbers = torch.stack([torch.cat([part.numbers for part in matrix]) for matrix in parts])
    return Written({end: together(end) for end in parts[0][0].tensors}, numbers)


class Recipe(NamedTuple):
    """Which weights a release quantises and how: the first pattern that a tensor's name holds decides."""

    config: dict[str, Any]  # quantization_config
    rules: tuple[tuple[str, Writer | None], ...]
    beside: dict[str, Any] | None = None  # hf_quant_config.json


# What no release quantises, and what is no matrix.
NEVER = (
    r"embed|conv1d|norm|A_log|dt_bias|\.D$|bias|gate\.weight|in_proj_(ba|a|b)\.|visual|mtp\.fc|eh_proj",
    None,
)
HEAD = ("lm_head", None)
ALL = r"(proj|in_proj_(qkvz|qkv|z)|lm_head)(\.weight)?$"
QWEN_FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 32],
    "modules_to_not_convert": ["lm_head", "model.embed_tokens", "in_proj_ba", "mlp.gate"],
}  # fmt: skip
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "kv_cache_scheme": None,
}


def compressed(
    form: str, bits: int, kind: str, strategy: str, group: int | None = None, **more: Any
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group, "symmetric": True}
    group_0 = {"weights": weights | more, "input_activations": None, "targets": ["Linear"]}
    return COMPRESSED | {"format": form, "config_groups": {"group_0": group_0}}


AUTO_ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int",
    "extra_config": {"model.layers.0.linear_attn.in_proj_a": {"bits": 16}},
}  # fmt: skip
MIXED_LAYERS = {
    "experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    "attention": {"quant_algo": "FP8"},
}
NVFP4_GROUPS = {
    "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
}

RECIPES = {
    "qwen_fp8": Recipe(QWEN_FP8, (NEVER, HEAD, (ALL, fp8_block((48, 32))))),
    "modelopt_fp8": Recipe(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        (NEVER, HEAD, (r"mtp\.", None), (ALL, fp8_tensor)),
    ),
    "modelopt_nvfp4": Recipe(  # Nemotron-3-Nano: attention stays
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": NVFP4_GROUPS},
        (NEVER, HEAD, (r"mtp\.|[qkvo]_proj", None), (ALL, nvfp4_modelopt)),
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
    ),
    "modelopt_mixed": Recipe(  # Qwen3.6-35B
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        (NEVER, (r"mtp\.", None), (r"expert|mlp|lm_head", nvfp4_modelopt), (ALL, fp8_tensor)),
        {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": MIXED_LAYERS}},
    ),
    "compressed_nvfp4": Recipe(
        compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", 16),
        (NEVER, HEAD, (ALL, nvfp4_compressed)),
    ),
    "compressed_w4a16": Recipe(
        compressed("pack-quantized", 4, "int", "group", 32), (NEVER, HEAD, (ALL, packed(4, 32)))
    ),
    "compressed_w4a16_asym": Recipe(
        compressed("pack-quantized", 4, "int", "group", 32, symmetric=False),
        (NEVER, HEAD, (ALL, packed(4, 32, symmetric=False))),
    ),
    "compressed_w8a16": Recipe(
        compressed("pack-quantized", 8, "int", "channel"), (NEVER, HEAD, (ALL, packed(8, 0)))
    ),
    "compressed_fp8": Recipe(
        compressed("float-quantized", 8, "float", "channel"), (NEVER, (ALL, fp8_channel))
    ),
    "compressed_fp8_block": Recipe(
        compressed("float-quantized", 8, "float", "block", block_structure=[48, 32]),
        (NEVER, (ALL, fp8_block((48, 32), torch.float32, "weight_scale"))),
    ),
    "compressed_int8": Recipe(
        compressed("int-quantized", 8, "int", "channel"), (NEVER, (ALL, int8_channel))
    ),
    "gptq": Recipe(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        (NEVER, HEAD, (r"mtp\.", None), (ALL, gptq(4, 32))),
    ),
    "gptq_v2": Recipe(
        {"quant_method": "gptq", "bits": 8, "group_size": 16, "sym": False, "checkpoint_format": "gptq_v2"},
        (NEVER, HEAD, (r"mtp\.", None), (ALL, gptq(8, 16, False, 2))),
    ),
    "auto_round": Recipe(
        AUTO_ROUND | {"sym": True, "packing_format": "auto_round:auto_gptq"},
        (NEVER, (ALL, gptq(4, 32, ordered=False))),
    ),
    "auto_round_asym": Recipe(
        AUTO_ROUND | {"sym": False, "packing_format": "auto_round"},
        (NEVER, HEAD, (ALL, gptq(4, 32, False, 2, False))),
    ),
    "awq": Recipe(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        (NEVER, HEAD, (r"mtp\.", None), (ALL, awq(32))),
    ),
}  # fmt: skip


class Copies(NamedTuple):
    quantised: Path
    twin: Path  # with the numbers of the quantised weights in fp32
    names: list[str]  # of the weights that were rounded


def quantise(source: Path, folder: Path, recipe: Recipe) -> Copies:
    """Copies of a checkpoint of one file."""
    ours, twin = folder / "quantised", folder / "twin"
    for copy in (ours, twin):
        shutil.copytree(source, copy)
    tensors = load_file(source / "model.safetensors")
    narrow, wide = tensors.copy(), tensors.copy()
    rounded, method = [], recipe.config.get("quant_method")
    for name, tensor in tensors.items():
        writer = next((writer for pattern, writer in recipe.rules if re.search(pattern, name)), None)
        written = _write(writer, tensor.float(), name, method) if writer is not None else None
        if written is None:
            continue
        rounded.append(name)
        del narrow[name]
        narrow |= {_beside(name, end, method): part for end, part in written.tensors.items()}
        wide[name] = written.numbers
    for copy, content in ((ours, narrow), (twin, wide)):
        dense = {name: tensor.contiguous() for name, tensor in content.items()}
        save_file(dense, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": recipe.config}
    (ours / "config.json").write_text(json.dumps(config))
    if recipe.beside is not None:
        (ours / "hf_quant_config.json").write_text(json.dumps(recipe.beside))
    return Copies(ours, twin, rounded)


def _write(writer: Writer, tensor: torch.Tensor, name: str, method: str | None) -> Written | None:
    if tensor.dim() < 3 or method == "fp8":
        return writer(tensor) if tensor.dim() > 1 else None
    return stacked(writer, tensor, 2 if name.endswith("gate_up_proj") else 1)


def _beside(name: str, end: str, method: str | None) -> str:
    """X.weight has X.weight_scale beside it, stacked experts X have X_scale, ModelOpt's X_weight_scale."""
    if name.endswith(".weight"):
        return f"{name.removesuffix('.weight')}.{end}"
    return (
        name if end == "weight" else f"{name}_{end if method == 'modelopt' else end.removeprefix('weight_')}"
    )
