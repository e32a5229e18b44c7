"""What single layers and config spellings mean."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import checkpoints
from kit.harness import Harness

from hemiola.builder import models
from hemiola.builder.build import Options, build
from hemiola.builder.checkpoint import Checkpoint, Config
from hemiola.builder.models import nemotron_h, qwen
from hemiola.builder.models.layers import Gates, Kit, Rope, rotate, spread
from hemiola.plugins import references

Get = Callable[..., Path]


def kit(folder: Path, exact: bool = False) -> Kit:
    return Kit(Checkpoint(folder), references, exact=exact, chunk_len=16)


def test_exact_gates_give_an_element_the_same_bits_wherever_it_stands(tiny_checkpoint: Get) -> None:
    """torch.sigmoid, silu and softplus do not, where threads cut a tensor (seen with 2 threads, AVX512)."""
    gates = Gates(kit(tiny_checkpoint("qwen3_5"), exact=True))
    wide = torch.randn(3001, 300, generator=torch.Generator().manual_seed(0)) * 8
    part, threads = wide[:, 50:146], torch.get_num_threads()
    pairs = (
        (gates.sigmoid, torch.sigmoid),
        (gates.silu, torch.nn.functional.silu),
        (gates.softplus, torch.nn.functional.softplus),
    )
    try:
        for gate, plain in pairs:
            torch.set_num_threads(1)
            expected = gate(part.contiguous())
            assert torch.allclose(expected, plain(part), rtol=1e-6, atol=1e-6)
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                assert torch.equal(gate(part), expected) and torch.equal(gate(part.contiguous()), expected)
                assert torch.equal(gate(part[:1]), expected[:1]) and torch.equal(
                    gate(part[7:40]), expected[7:40]
                )
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("rotary_dim", "head_dim"), [(16, 64), (8, 8), (2, 12)])
def test_rotating_spread_channels_is_partial_rotation(
    rotary_dim: int, head_dim: int, tiny_checkpoint: Get
) -> None:
    whole = kit(tiny_checkpoint("qwen3_5"))
    rope = Rope(whole, 10000.0, rotary_dim, head_dim)
    frequencies = whole.sources[rope.frequencies].read()
    x, positions = torch.randn(5, 3, head_dim), torch.tensor([0, 1, 2, 77, 400])
    order = spread(rotary_dim, head_dim)
    assert sorted(order) == [*range(head_dim)]
    turns = torch.func.functional_call(rope, {"frequencies": frequencies}, (positions,))
    found = rotate(x[:, :, order], turns)
    angles = positions[:, None] * 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    a, b, rest = x.split([rotary_dim // 2, rotary_dim // 2, head_dim - rotary_dim], dim=2)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    expected = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=2)
    assert torch.allclose(found, expected[:, :, order], atol=1e-5)


@pytest.mark.parametrize(
    "spelling",
    [
        {"hybrid_override_pattern": "ME*-"},
        {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
        {
            "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
            "hybrid_override_pattern": None,
        },
        {"hybrid_override_pattern": "MMMM", "layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    ],
)
def test_every_spelling_of_a_nemotron_pattern(spelling: dict) -> None:
    assert nemotron_h.pattern(Config(spelling, "config.json")) == "ME*-"
    mtp = {f"mtp_{key}": value for key, value in spelling.items()}
    assert nemotron_h.pattern(Config(mtp, "config.json"), "mtp_", "*E") == "ME*-"
    assert nemotron_h.pattern(Config({}, "config.json"), "mtp_", "*E") == "*E"


def test_which_qwen_layers_are_sparse() -> None:
    def sparse(**values: object) -> list[int]:
        return [i for i in range(6) if qwen.is_sparse(Config(values, "config.json"), i)]

    assert sparse() == []
    assert sparse(num_experts=8) == [0, 1, 2, 3, 4, 5]
    assert sparse(num_experts=8, mlp_only_layers=[1, 4]) == [0, 2, 3, 5]
    assert sparse(num_experts=8, decoder_sparse_step=2, mlp_only_layers=[3]) == [1, 5]
    assert sparse(num_experts=0) == []


def test_qwen_layer_kinds_by_interval_or_list() -> None:
    cfg = {"num_hidden_layers": 5, "full_attention_interval": 2}
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"]
    assert qwen.layer_kinds(Config(cfg, "")) == kinds
    assert qwen.layer_kinds(Config(cfg | {"layer_types": kinds[::-1]}, "")) == kinds[::-1]


def test_time_step_limit_of_the_config_is_honoured(tiny_checkpoint: Get, tmp_path: Path) -> None:
    source = shutil.copytree(tiny_checkpoint("nemotron_h_dense"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"time_step_limit": [0.02, 0.05]}))
    build(source, tmp_path / "engine", Options(max_len=64, max_rows=1, max_step_tokens=64, drafts="none"))
    model = checkpoints.reference(source)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.02, 0.05)
    tokens = [*range(3, 50)]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    assert (Harness(tmp_path / "engine").run(tokens) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_loading_reads_no_weights(family: str, tiny_checkpoint: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> torch.Tensor:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "_read", read)
    model = models.load(Checkpoint(tiny_checkpoint(family)), references, exact=False, chunk_len=16)
    assert model.draft is not None and all(p.is_meta for p in model.trunk.parameters())
    names = [*model.weights(model.trunk)]
    assert len(set(names)) == len(names) and not any(name.startswith("mtp.") for name in names)
