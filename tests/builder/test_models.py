"""What single layers and config spellings mean."""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import checkpoints
from kit.harness import Harness
from kit.varied import VARIED
from safetensors.torch import load_file, save_file

from hemiola.builder import models
from hemiola.builder.build import Options, build
from hemiola.builder.checkpoint import Checkpoint, Config
from hemiola.builder.cut import Cut
from hemiola.builder.models import nemotron_h, qwen
from hemiola.builder.models.layers import Kit, Linear, Rope, SideBySide
from hemiola.builder.random_weights import RandomTensors
from hemiola.builder.shard import Shard
from hemiola.plugins import references
from hemiola.plugins.gpu.checks import is_described
from hemiola.runtime.errors import Refused

Get = Callable[..., Path]
CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


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


class Noted(Linear):
    """A dense layer that writes down what it gave."""

    def __init__(self, num_outputs: int, given: list[torch.Tensor]) -> None:
        torch.nn.Module.__init__(self)
        self.weight, self.given = torch.nn.Parameter(torch.randn(num_outputs, 3)), given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given.append(x @ self.weight.T)
        return self.given[-1]


def test_parts_of_layers_side_by_side_are_copied_only_where_one_lies_in_two() -> None:
    given: list[torch.Tensor] = []
    layers, x = SideBySide([Noted(12, given), Noted(4, given)]), torch.randn(5, 3)
    for widths, is_copied in (([8, 4, 2, 0, 2], False), ([8, 6, 2], True)):
        wanted = layers(x).split(widths, dim=1)
        given.clear()
        found = layers.split(x, widths)
        assert all(map(torch.equal, found, wanted)) and len(found) == len(wanted)
        owners = {part.untyped_storage().data_ptr() for part in found if part.numel()}
        own = [whole.untyped_storage().data_ptr() for whole in given]
        assert (owners != set(own)) == is_copied
        assert is_copied or given[0].shape[1] == 4  # the narrowest first


@pytest.mark.parametrize("config", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_no_dense_layer_of_a_real_model_takes_the_tile_that_fits_all(config: Path) -> None:
    """Routers with the gate of a shared expert did, for their 257 outputs: 43 us a layer on an H200."""
    for size in (1, 4):
        sizes: dict[str, Any] = {"chunk_len": 16, "max_len": 64, "dtype": torch.bfloat16}
        model = models.load(Checkpoint(config, RandomTensors), references, cut=Cut(size), **sizes)
        for segment in filter(None, (model.trunk, model.draft)):
            for name, layer in segment.named_modules():
                if isinstance(layer, Linear):
                    outputs = layer.weight.new_empty(3, len(layer.weight))
                    assert is_described(layer.weight) and is_described(outputs), (size, name)


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


def test_no_field_has_one_value_in_all_checkpoints(
    tiny_checkpoint: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number in a family's code that ought to be read would pass for such a field."""
    values: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    read, code = Config.read, ""

    def noted(self: Config, key: str, *rest: Any) -> Any:
        value = read(self, key, *rest)
        values[code, key].add(repr(value))
        return value

    monkeypatch.setattr(Config, "read", noted)
    for family in (*checkpoints.FAMILIES, *VARIED):
        checkpoint = Checkpoint(tiny_checkpoint(family))
        code = models.FAMILIES[checkpoint.architecture].__name__
        models.load(checkpoint, references, chunk_len=16, max_len=64)
    tested = {"architectures", "time_step_limit", "layers_block_type", "mtp_layers_block_type"}
    tested.add("model_type")  # in test_build.py
    assert {key for (_, key), found in values.items() if len(found) == 1} == tested


@pytest.mark.parametrize(
    ("outer", "nested", "has_head", "tied"),
    [
        (None, True, False, True),
        (True, None, False, True),
        (True, False, False, True),
        (False, True, True, False),
        (None, False, True, False),
        (None, None, True, False),
    ],
)
def test_which_word_ties_the_head(
    outer: bool | None, nested: bool | None, has_head: bool, tied: bool, tiny_checkpoint: Get, tmp_path: Path
) -> None:
    """The outer config's, as transformers has it; without one, the nested one's."""
    source = shutil.copytree(tiny_checkpoint("qwen3_5_tied"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = outer, nested
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    if has_head:
        tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"] * 2
    save_file(tensors, source / "model.safetensors")
    trunk = models.load(Checkpoint(source), references, chunk_len=16, max_len=64).trunk
    assert (trunk.head.weight is trunk.embed.weight) == tied


def test_a_qwen3_5_whose_experts_add_up_to_anything_is_refused(tiny_checkpoint: Get, tmp_path: Path) -> None:
    """transformers has no norm_topk_prob for Qwen3.5 and normalises always; obeying it gave other tokens."""
    source = shutil.copytree(tiny_checkpoint("qwen3_5_moe"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    for value in (True, False):
        config["text_config"]["norm_topk_prob"] = value
        (source / "config.json").write_text(json.dumps(config))
        with nullcontext() if value else pytest.raises(Refused, match="norm_topk_prob = False is not supp"):
            models.load(Checkpoint(source), references, chunk_len=16, max_len=64)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_loading_reads_no_weights(family: str, tiny_checkpoint: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> torch.Tensor:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Shard, "_read", read)
    model = models.load(Checkpoint(tiny_checkpoint(family)), references, chunk_len=16, max_len=64)
    assert model.draft is not None and all(p.is_meta for p in model.trunk.parameters())
    names = [*model.weights(model.trunk)]
    assert len(set(names)) == len(names) and not any(name.startswith("mtp.") for name in names)
