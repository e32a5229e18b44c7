"""Engines for several ranks: their parts together are the whole model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import quantised
from kit.divisible import DIVISIBLE
from kit.harness import Harness
from kit.ops import rel_error, same_bits
from kit.rank_threads import RankHarness, at_once, groups

from hemiola.builder.build import Options, build
from hemiola.builder.cut import Cut
from hemiola.builder.formats.module import LazyGroup
from hemiola.builder.lazy import Lazy
from hemiola.plugins.groups import Layout, WeightGroup
from hemiola.runtime import manifest
from hemiola.runtime.errors import Refused

TEXT = [20, 6, 7, *range(30, 70)]


@pytest.mark.parametrize(("family", "tp"), [("nemotron_h_divisible", 2), *((name, 4) for name in DIVISIBLE)])
def test_the_parts_of_all_ranks_compute_the_whole_model(
    tiny_engine: Callable[..., Path], family: str, tp: int
) -> None:
    """Logits side by side, hidden states and drafts alike; a sum in another order rounds otherwise."""
    whole = Harness(tiny_engine(family))
    engine_dir = tiny_engine(family, tp=tp)

    def run(rank: int, group: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = Harness(engine_dir, group)
        logits = own.run(TEXT, 10, 3)
        drafted = own.draft(own.requests[0], TEXT[1:4], own.hidden[:3], first=1)
        return logits, own.hidden, drafted.logits, drafted.hidden

    with groups(tp, room=4096) as found:
        parts = [*zip(*at_once(found, run), strict=True)]
    logits = whole.run(TEXT, 10, 3)
    drafted = whole.draft(whole.requests[0], TEXT[1:4], whole.hidden[:3], first=1)
    assert rel_error(torch.cat(parts[0], 1), logits) < 1e-5
    assert rel_error(torch.cat(parts[2], 1), drafted.logits) < 1e-5
    for own, wanted in ((parts[1], whole.hidden), (parts[3], drafted.hidden)):
        assert rel_error(own[0], wanted) < 1e-5
        assert all(torch.equal(own[0], other) for other in own)


QUANTISED: dict[tuple[str, str], dict] = {  # each with other options, so that many pairs are met
    ("qwen_fp8", "qwen3_5_moe_divisible"): {"tp": 2, "kv_dtype": "fp8"},
    ("compressed_nvfp4", "qwen3_5_moe_divisible"): {"tp": 2, "draft_head": "fp8"},
    ("compressed_w4a16_asym", "qwen3_next_divisible"): {
        "tp": 2, "kv_dtype": "turboquant_4bit_nc", "draft_head": "int4",
    },
    ("modelopt_nvfp4", "nemotron_h_divisible"): {"tp": 2, "kv_dtype": "turboquant_3bit_nc"},
    ("compressed_int8", "qwen3_5_divisible"): {
        "tp": 4, "kv_dtype": "turboquant_k8v4", "draft_head": "fp8", "same_bits": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", QUANTISED, ids="-".join)
def test_ranks_of_quantised_weights_have_the_bits_of_the_twin(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, case: tuple[str, str]
) -> None:
    """Which has the same numbers in fp32, cut alike."""
    (recipe, family), made = case, []
    copies = quantised.quantise(tiny_checkpoint(family), tmp_path, quantised.RECIPES[recipe])
    for copy in (copies.quantised, copies.twin):
        engine_dir = tmp_path / f"{copy.name}-engine"
        build(copy, engine_dir, Options(**QUANTISED[case], max_len=256, max_rows=2, max_step_tokens=128))
        ranks = RankHarness(engine_dir)
        request = ranks.request()
        parts = [ranks.step([(request, piece, 0)])[0] for piece in (TEXT[:30], TEXT[30:31], TEXT[31:])]
        hidden = ranks.hidden
        drafted = ranks.draft(request, TEXT[1:4], hidden[:3], first=1)
        made.append((torch.cat(parts), hidden, *drafted))
    assert all(map(same_bits, *made))
    kinds = {
        layout
        for segment in manifest.load(tmp_path / "quantised-engine").segments
        for layout in segment.layouts.values()
    }
    assert kinds, "nothing is quantised"


@pytest.mark.parametrize("family", ["nemotron_h_divisible", "qwen3_5_moe_divisible"])
def test_bits_do_not_depend_on_the_number_of_ranks(tiny_engine: Callable[..., Path], family: str) -> None:
    """Of engines with --same-bits: 1, 2 and 4 ranks compute the same logits and hidden states."""
    whole = Harness(tiny_engine(family, same_bits=True))
    logits = whole.run(TEXT, 10, 3)
    drafted = whole.draft(whole.requests[0], TEXT[1:4], whole.hidden[:3], first=1)
    for tp in (2, 4):
        ranks = RankHarness(tiny_engine(family, same_bits=True, tp=tp))
        request = ranks.request()
        parts = [ranks.step([(request, piece, 0)])[0] for piece in (TEXT[:10], TEXT[10:13], TEXT[13:])]
        assert same_bits(torch.cat(parts), logits)
        assert same_bits(ranks.hidden, whole.hidden)
        own = ranks.draft(request, TEXT[1:4], whole.hidden[:3], first=1)
        assert same_bits(own.logits, drafted.logits) and same_bits(own.hidden, drafted.hidden)
    plain = Harness(tiny_engine(family)).run(TEXT, 10, 3)
    assert not same_bits(plain, logits) and rel_error(plain, logits) < 1e-5, "the option changes the order"


LAYOUTS = [Layout("int4", 16, ("zeros",)), Layout("e4m3", 0), Layout("e2m1", 16, ("factor",))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_of_quantised_weights_are_the_parts_of_their_numbers(layout: Layout) -> None:
    """Rows by part and columns, scales along; a border within a scale's span is refused."""
    rng = torch.Generator().manual_seed(0)

    def read(begin: int = 0, end: int | None = None) -> WeightGroup:
        empty, made = WeightGroup.empty(layout, (12, 64)).tensors, {}
        for name, tensor in empty.items():
            numbers = torch.randint(1, 8, tensor.shape, generator=rng.manual_seed(len(name)))
            made[name] = numbers.to(tensor.dtype)[begin:end]
        return WeightGroup(layout, made)

    whole = Lazy.quantised((12, 64), LazyGroup(layout, read))
    columns = [Cut(4, rank).columns(whole).read() for rank in range(4)]
    assert torch.equal(torch.cat(columns, 1), whole.read())
    rows = [Cut(4, rank).rows(whole, [8, 4]).read() for rank in range(4)]
    parts = whole.read().split([8, 4])
    assert torch.equal(torch.cat([own[:2] for own in rows]), parts[0])
    assert torch.equal(torch.cat([own[2:] for own in rows]), parts[1])
    if layout.span:
        with pytest.raises(Refused, match="8 inputs of a layer"):
            Cut(8, 0).columns(whole)


def test_what_same_bits_cannot_cut_is_not_the_fault_of_tp() -> None:
    """The error said --tp 8 of an engine built with --same-bits --tp 4."""
    segment = Cut(4, 1).segments(8)[0]
    with pytest.raises(Refused, match=r"^--same-bits \(8 parts\) does not divide .*; leave --same-bits out$"):
        segment.share("its inner width", 12)
    group = LazyGroup(Layout("int4", 16), lambda *_: WeightGroup.empty(Layout("int4", 16), (12, 64)))
    with pytest.raises(Refused, match=r"\(8 parts\) leaves a part 8 inputs .*; leave --same-bits out$"):
        segment.columns(Lazy.quantised((12, 64), group))
