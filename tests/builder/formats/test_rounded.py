"""`--quantize`: the nearest codes, in weights of dense layers and experts alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import quantised
from kit.harness import Harness
from kit.ops import same_bits
from safetensors.torch import load_file, save_file

from hemiola.builder import models
from hemiola.builder.build import build
from hemiola.builder.checkpoint import Checkpoint, Files
from hemiola.builder.formats.rounded import KEPT, LAYOUTS, SPAN, rounded, rounding
from hemiola.builder.formats.rounded import quantised as quantise_lazily
from hemiola.builder.lazy import Lazy
from hemiola.builder.options import Options
from hemiola.plugins import references
from hemiola.plugins.groups import Layout, WeightGroup, dequantised, factors, joined, numbers
from hemiola.runtime import manifest

Get = Callable[..., Path]
EACH = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
SIZES = {"max_len": 256, "max_rows": 4, "max_step_tokens": 128, "page_len": 32, "num_drafts": 2}


def all_codes(layout: Layout) -> torch.Tensor:
    """Every number that a code stands for."""
    codes = torch.arange(256).to(torch.uint8)
    if layout.kind == "e4m3":
        codes = codes[codes % 128 != 127].view(torch.float8_e4m3fn)
    else:
        codes = {"int8": codes.view(torch.int8), "int4": torch.arange(-8, 8), "e2m1": codes[:16]}[layout.kind]
    return numbers(WeightGroup(layout, {"codes": codes}))


@EACH
def test_every_code_is_the_nearest(layout: Layout) -> None:
    weight = torch.randn(40, 320, generator=torch.Generator().manual_seed(0))
    weight *= torch.logspace(-6, 3, 40)[:, None]
    weight[5], weight[6, :128], weight[7, 3] = 0, 1e-42, 1e4
    group = rounded(weight, layout)
    scales = factors(group).repeat_interleave(layout.span, -1)[:, :320]
    empty = WeightGroup.empty(layout, (40, 320))
    assert (scales > 0).all()
    for name, tensor in group.tensors.items():
        assert (tensor.shape, tensor.dtype) == (empty.tensors[name].shape, empty.tensors[name].dtype)
    nearest = (weight / scales).unsqueeze(-1).sub(all_codes(layout)).abs().amin(-1)
    assert torch.equal((weight / scales - numbers(group)).abs(), nearest)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_that_are_rounded_in_parts_are_those_of_the_whole(name: str) -> None:
    weight = torch.randn(33, 272, generator=torch.Generator().manual_seed(3))
    expected = rounded(weight, LAYOUTS[name])
    found = quantise_lazily(Lazy.of(weight), name).group
    assert found is not None and found.layout == expected.layout
    whole = joined([found.read(first, first + 8) for first in range(0, 33, 8)])
    for part, wanted in expected.tensors.items():
        assert torch.equal(whole.tensors[part].float(), wanted.float()), part


def test_ties_go_to_the_even_code() -> None:
    weight = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0] + [0.0] * 6]) * 448
    group = rounded(weight, LAYOUTS["nvfp4"])
    assert float(group.tensors["factor"]) == 1 and float(group.tensors["scales"].float()) == 448
    assert numbers(group)[0, :10].tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 0, -4]


@EACH
def test_stacked_experts_are_rounded_one_by_one(layout: Layout) -> None:
    weight = torch.randn(3, 40, 160, generator=torch.Generator().manual_seed(1))
    stacked, alone = rounded(weight, layout), [rounded(each, layout) for each in weight]
    assert same_bits(dequantised(stacked), torch.stack([dequantised(group) for group in alone]))


@pytest.mark.parametrize(
    "name, family, head",
    [
        ("fp8", "qwen3_next", "int8"),
        ("int8", "nemotron_h_moe", None),
        ("int4", "qwen3_5_moe", None),
        ("nvfp4", "nemotron_h_dense", "int4"),
    ],
)
def test_an_engine_has_the_bits_of_its_fp32_twin(
    name: str, family: str, head: str | None, tiny_checkpoint: Get, tmp_path: Path
) -> None:
    source = tiny_checkpoint(family)
    ours = build(source, tmp_path / "ours", Options(**SIZES, quantize=name, quantize_head=head))
    copies = quantised.quantise(source, tmp_path, quantised.Recipe({}, ()))
    tensors = load_file(copies.twin / "model.safetensors")
    narrow = Checkpoint(source, rounding(Files, name))
    matrices = [n for n, tensor in tensors.items() if tensor.dim() > 1 and is_matrix(n)]
    wide = {n: narrow.matrix(n, *tensors[n].shape).read().float() for n in matrices}
    assert sum(not torch.equal(wide[n], tensors[n].float()) for n in matrices) > len(matrices) / 2
    if head is not None:
        wide["lm_head.weight"] = round_head(tensors["lm_head.weight"], head)
    save_file(tensors | wide, copies.twin / "model.safetensors", metadata={"format": "pt"})
    build(copies.twin, tmp_path / "theirs", Options(**SIZES))
    tokens = [*range(5, 75)]
    found, wanted = (Harness(tmp_path / which).run(tokens, 30, 1, 2) for which in ("ours", "theirs"))
    assert same_bits(found, wanted)
    kinds = {text.split()[0] for segment in ours.segments for text in segment.layouts.values()}
    assert kinds == {LAYOUTS[name].kind} | ({head} if head else set())
    plain = build(source, tmp_path / "plain", Options(**SIZES))
    assert plain.identity != ours.identity
    is_head_rounded = any("head" in weight for weight in ours.segment("trunk").layouts)
    assert is_head_rounded == (head is not None), "output heads stay unless they are asked for"


def round_head(weight: torch.Tensor, name: str) -> torch.Tensor:
    assert weight.shape[1] <= SPAN
    return dequantised(rounded(weight.float(), LAYOUTS[name]._replace(span=0)))


def test_embeddings_stay_as_they_are_when_the_head_that_is_tied_to_them_is_rounded(
    tiny_checkpoint: Get,
) -> None:
    checkpoint = Checkpoint(tiny_checkpoint("qwen3_5_tied"))
    model = models.load(checkpoint, references, chunk_len=16, max_len=64, quantize_head="int8")
    assert model.draft is not None and model.draft.head is model.trunk.head
    embed, head = (model.sources[part.weight] for part in (model.trunk.embed, model.trunk.head))
    assert embed.layout is None and str(head.layout) == "int8 row"
    assert same_bits(head.read(), round_head(embed.read(), "int8"))


def is_matrix(name: str) -> bool:
    """What a family asks for as a weight of a dense layer or of experts."""
    other = ("embed", "conv1d", "norm", "mlp.gate.", "mixer.gate.", "shared_expert_gate", "visual")
    return not KEPT.search(name) and not any(part in name for part in other)


def test_random_weights_are_rounded_and_stored(tiny_checkpoint: Get, tmp_path: Path) -> None:
    config = json.loads((tiny_checkpoint("qwen3_5") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = build(tmp_path, tmp_path / "engine", Options(**SIZES, quantize="int4", random_weights=True))
    assert manifest.load(tmp_path / "engine") == made
    assert made.segment("trunk").layouts
