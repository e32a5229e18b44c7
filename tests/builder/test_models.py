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
from hemiola.builder.checkpoint import Checkpoint, Config, Files
from hemiola.builder.models import nemotron_h, qwen
from hemiola.builder.models.layers import Kit, Rope
from hemiola.plugins import references

Get = Callable[..., Path]


@pytest.mark.parametrize(("theta", "rotary_dim"), [(10000.0, 4), (1e7, 22)])
def test_the_rotary_table_is_that_of_transformers(
    theta: float, rotary_dim: int, tiny_checkpoint: Get
) -> None:
    """Angles are rounded as transformers' are; their cos and sin are as good as fp32 can be."""
    kit = Kit(Checkpoint(tiny_checkpoint("qwen3_5")), references, chunk_len=16, max_len=1000)
    table = kit.sources[Rope(kit, theta, rotary_dim).table].read()
    frequencies = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim)
    angles = torch.arange(1000).float()[:, None] * frequencies
    assert torch.equal(table, torch.stack((angles.double().cos(), angles.double().sin()), 1).float())


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

    monkeypatch.setattr(Files, "_read", read)
    model = models.load(Checkpoint(tiny_checkpoint(family)), references, chunk_len=16, max_len=64)
    assert model.draft is not None and all(p.is_meta for p in model.trunk.parameters())
    names = [*model.weights(model.trunk)]
    assert len(set(names)) == len(names) and not any(name.startswith("mtp.") for name in names)
