"""`--act-dtype fp8`: inputs are e4m3 where a checkpoint says so; what would compute otherwise is refused."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import quantised
from kit.quantised import RECIPES, Tensors

from hemiola.builder.build import build
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.cut import Cut
from hemiola.builder.options import Options
from hemiola.runtime.errors import Refused

SIZE = (192, 256)
QWEN = quantised.QWEN_FP8 | {"weight_block_size": [128, 128]}
MODELOPT = RECIPES["modelopt_fp8"].config
BLOCK, CHANNEL, STATIC = quantised.fp8_block(), quantised.fp8_channel, quantised.fp8_tensor
CHANNEL_BLOCK = quantised.fp8_block((128, 128), torch.float32, "weight_scale")


def compressed(*inputs: dict[str, Any] | None) -> dict[str, Any]:
    """A group of FP8 weights for each kind of inputs."""
    config = quantised.compressed("float-quantized", 8, "float", "channel")
    group = config["config_groups"]["group_0"]
    groups = {f"group_{n}": group | {"input_activations": each} for n, each in enumerate(inputs)}
    return config | {"config_groups": groups}


def fp8(strategy: str, group: int | None = None, dynamic: bool = True, bits: int = 8) -> dict[str, Any]:
    kind = {"num_bits": bits, "type": "float", "dynamic": dynamic}
    return kind | {"strategy": strategy, "group_size": group}


def with_scale(value: float, *shape: int) -> Callable[[torch.Tensor], quantised.Written]:
    def write(w: torch.Tensor) -> quantised.Written:
        made = CHANNEL(w)
        return made._replace(tensors=made.tensors | {"input_scale": torch.full(shape, value)})

    return write


ROWS = [  # writer, quantization_config, the layout
    (BLOCK, QWEN, "e4m3 128 x e4m3 by group"),
    (BLOCK, {}, "e4m3 128"),
    (CHANNEL_BLOCK, MODELOPT | {"quant_algo": "FP8_BLOCK_SCALES"}, "e4m3 128 x e4m3 by group"),
    (CHANNEL_BLOCK, MODELOPT | {"quant_algo": "FP8_PB_WO"}, "e4m3 128"),
    (STATIC, MODELOPT, "e4m3 row x e4m3 by static"),
    (STATIC, {}, "e4m3 row x e4m3 by static"),
    (CHANNEL, MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "e4m3 row x e4m3 by token"),
    (CHANNEL, compressed(fp8("token")), "e4m3 row x e4m3 by token"),
    (CHANNEL, compressed(fp8("group", 128)), "e4m3 row x e4m3 by group"),
    (with_scale(0.25, 1), compressed(fp8("tensor", dynamic=False)), "e4m3 row x e4m3 by static"),
    (CHANNEL, compressed(None), "e4m3 row"),
    (CHANNEL, compressed(fp8("token", bits=4)), "e4m3 row"),
    (quantised.nvfp4_modelopt, RECIPES["modelopt_nvfp4"].config, "e2m1 16 factor"),
    (quantised.int8_channel, RECIPES["compressed_int8"].config, "int8 row"),
]


@pytest.mark.parametrize("writer, config, layout", ROWS, ids=range(len(ROWS)))
def test_a_layout_says_how_inputs_are_rounded(
    writer: Any, config: dict[str, Any], layout: str, alone: Callable[..., Checkpoint]
) -> None:
    made = writer(torch.randn(SIZE, generator=torch.Generator().manual_seed(0)))
    for narrow in (True, False):
        lazy = alone(made.tensors, config, narrow_inputs=narrow).matrix("X.weight", *SIZE)
        assert str(lazy.layout) == (layout if narrow else layout.partition(" x ")[0])
        assert lazy.group is not None and lazy.group.read().layout == lazy.layout
        assert torch.equal(lazy.read(), made.numbers)
    if "static" in layout:
        lazy = alone(made.tensors, config, narrow_inputs=True).matrix("X.weight", *SIZE)
        part = lazy.take(lambda rows: rows[10:30])
        assert part.group is not None and part.group.static == float(made.tensors["input_scale"])
        assert part.group.read().tensors["input"].tolist() == [[part.group.static]] * 20


def scale(value: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update(input_scale=value)


NOTHING: Callable[[Tensors], object] = lambda tensors: None  # noqa: E731
WRONG = [  # writer, config, what is done to the tensors, what is said
    (
        CHANNEL,
        compressed(fp8("tensor")),
        NOTHING,
        "scales of whole tensors, by which a token's numbers depend",
    ),
    (
        CHANNEL,
        QWEN | {"quant_method": "compressed-tensors"} | compressed(fp8("channel")),
        NOTHING,
        "by channel",
    ),
    (CHANNEL, compressed(fp8("group", 64)), NOTHING, "inputs of FP8 weights are rounded by group of 64;"),
    (
        CHANNEL,
        compressed(fp8("group", 128), fp8("token")),
        NOTHING,
        "by group and token, and no tensor tells",
    ),
    (CHANNEL, compressed(fp8("token"), None), NOTHING, "by token and none, and no tensor tells which"),
    (CHANNEL, compressed(fp8("tensor", dynamic=False)), NOTHING, "needs X.input_scale beside it"),
    (quantised.fp8_block((48, 32)), quantised.QWEN_FP8, NOTHING, "X has a scale for 32 inputs, no multiple"),
    (
        BLOCK,
        QWEN,
        scale(torch.tensor(1.0)),
        "X.input_scale is a static scale, but configs say that inputs are",
    ),
    (STATIC, MODELOPT, scale(torch.tensor(0.0)), "X.input_scale holds 1 of 1 scales that are zero, negative"),
    (STATIC, MODELOPT, scale(torch.tensor(float("nan"))), "X.input_scale holds 1 of 1 scales that are zero"),
    (STATIC, MODELOPT, scale(torch.ones(2)), "X.input_scale has shape [2], its format asks for []"),
    (STATIC, MODELOPT, scale(torch.ones((), dtype=torch.int32)), "X.input_scale is I32, its format has F32"),
]


@pytest.mark.parametrize("writer, config, change, said", WRONG, ids=range(len(WRONG)))
def test_what_would_compute_otherwise_is_refused(
    writer: Any, config: dict[str, Any], change: Any, said: str, alone: Callable[..., Checkpoint]
) -> None:
    made = writer(torch.randn(SIZE, generator=torch.Generator().manual_seed(0)))
    change(made.tensors)
    with pytest.raises(Refused, match=re.escape(said)) as refused:
        alone(made.tensors, config, narrow_inputs=True).matrix("X.weight", *SIZE)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "writer, config, size, said",
    [
        (CHANNEL, compressed(fp8("token")), 2, "--tp 2 cuts inputs of which a token has one scale"),
        (
            CHANNEL,
            compressed(fp8("group", 128)),
            4,
            "leaves a rank 64 inputs of a layer whose scales are for 128",
        ),
        (CHANNEL, compressed(fp8("group", 128)), 2, ""),
        (STATIC, MODELOPT, 4, ""),
    ],
    ids=range(4),
)
def test_ranks_cut_no_scale(
    writer: Any, config: dict[str, Any], size: int, said: str, alone: Callable[..., Checkpoint]
) -> None:
    made = writer(torch.randn(SIZE, generator=torch.Generator().manual_seed(0)))
    lazy = alone(made.tensors, config, narrow_inputs=True).matrix("X.weight", *SIZE)
    if said:
        with pytest.raises(Refused, match=re.escape(said)):
            Cut(size, 1).columns(lazy)
        return
    part, share = Cut(size, 1).columns(lazy), SIZE[1] // size
    assert part.kind == lazy.kind and torch.equal(part.read(), made.numbers[:, share : 2 * share])


@pytest.mark.parametrize(
    "family, said",
    [
        ("qwen3_5_moe_experts", r"gate and up of .*experts\.0 have inputs of unlike scales"),
        ("qwen3_5_moe", r"gate_up_proj_input_scale\[0\] has unlike scales for gate and up"),
    ],
    ids=["one by one", "in one tensor"],
)
def test_parts_of_an_expert_with_unlike_static_scales_are_refused(
    family: str, said: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """They are one matrix, and have inputs in common."""
    source = shutil.copytree(tiny_checkpoint(family), tmp_path / "source")
    copies = quantised.quantise(source, tmp_path, RECIPES["modelopt_fp8"])
    with pytest.raises(Refused, match=said):
        build(copies.quantised, tmp_path / "engine", Options(act_dtype="fp8"))
