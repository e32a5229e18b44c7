"""An MTP head that reads the output head in 8 or 4 bits: other drafts, the same tokens and logits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import quantised
from kit.engine_hand import EngineHand, Wanted
from kit.harness import Harness
from kit.ops import same_bits
from kit.quantised import RECIPES
from safetensors.torch import load_file, save_file

from hemiola import LLM, SamplingParams
from hemiola.builder.build import Options, build
from hemiola.builder.formats.rounded import LAYOUTS, SPAN, rounded
from hemiola.plugins.groups import dequantised
from hemiola.runtime import manifest
from hemiola.runtime.cli import inspect, inspected

Get = Callable[..., Path]
SMALL = {"max_len": 512, "max_rows": 8}  # tests/conftest.py's
FEW = 100  # of some 320 ids
BUILT = {
    "draft_vocab": None,
    "max_step_tokens": 512,
    "page_len": 32,
    "chunk_len": 16,
}  # test_reduced_head.py's
SAMPLED = {"temperature": 0.8, "top_p": 0.9}
EDITED = {"logit_bias": {7: 2.0, 310: 5.0}, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("family", "codes", "num"),
    [("nemotron_h_moe", "int4", None), ("qwen3_5", "fp8", None), ("qwen3_5", "int4", FEW)],
)
def test_drafts_have_the_bits_of_a_checkpoint_with_the_rounded_head(
    tiny_checkpoint: Get, tiny_engine: Get, tmp_path: Path, family: str, codes: str, num: int | None
) -> None:
    """And the trunk has those of the engine without it."""
    twin = shutil.copytree(tiny_checkpoint(family), tmp_path / "twin")
    tensors = load_file(twin / "model.safetensors")
    head = tensors["lm_head.weight"].float()
    assert head.shape[1] <= SPAN
    layout = LAYOUTS[codes]._replace(span=0)
    rounded_head = dequantised(rounded(head, layout))
    assert not torch.equal(rounded_head, head)
    save_file(tensors | {"lm_head.weight": rounded_head}, twin / "model.safetensors")

    build(twin, tmp_path / "engine", Options(**SMALL | BUILT))
    ours, theirs = (
        tiny_engine(family, **BUILT | {"draft_vocab": num}, draft_head=codes),
        tiny_engine(family, **BUILT),
    )
    tokens, found = list(range(3, 60)), []
    for engine in (ours, theirs, tmp_path / "engine"):
        harness = Harness(engine)
        request = harness.request()
        (trunk,) = harness.step([(request, tokens, 0)])
        found.append((trunk, *harness.draft(request, tokens[1:], harness.hidden[:-1], first=1)))
    (trunk, drafted, hidden), (wide_trunk, wide, wide_hidden), (_, expected, _) = found
    assert same_bits(trunk, wide_trunk) and same_bits(hidden, wide_hidden)
    assert same_bits(drafted, expected[:, :num]) and not torch.equal(drafted, wide[:, :num])


@pytest.mark.parametrize(
    ("family", "num_drafts", "built"),
    [
        ("nemotron_h_moe", 3, {"draft_head": "int4"}),
        ("qwen3_5", 1, {"draft_head": "int4"}),
        ("qwen3_5_tied", 2, {"draft_head": "fp8", "draft_vocab": FEW}),
    ],
)
def test_only_drafts_change(
    engine_hands: Callable[..., EngineHand], wanted: Wanted, family: str, num_drafts: int, built: dict
) -> None:
    """Beside each other: greedy, drawn and edited requests."""
    text, hands = wanted.story(family), []
    for options in (built, {}):
        hand = engine_hands(family, "mtp", BUILT | options, num_drafts=num_drafts, pipeline_depth=1)
        for n, params in enumerate(({}, SAMPLED, EDITED)):
            hand.submit(text[: 9 + 8 * n], max_tokens=24, seed=n, **params)
        hand.end()  # which compares tokens, logits and drafts with this engine's plain run
        hands.append(hand)
    ours, theirs = hands
    assert [ours.token_ids(r.id) for r in ours.requests] == [theirs.token_ids(r.id) for r in theirs.requests]
    shared = ours.recorded.keys() & theirs.recorded.keys()
    assert len(shared) >= 24
    assert all(same_bits(ours.recorded[ids][0], theirs.recorded[ids][0]) for ids in shared)


def test_a_quantised_checkpoint_keeps_its_text(tiny_checkpoint: Get, tmp_path: Path) -> None:
    source = quantised.quantise(tiny_checkpoint("qwen3_5"), tmp_path, RECIPES["qwen_fp8"]).quantised
    sizes = {"max_len": 128, "max_rows": 2, "max_step_tokens": 64, "page_len": 32, "num_drafts": 3}
    found = []
    for codes in ("int4", None):
        build(source, tmp_path / f"engine-{codes}", Options(**sizes, draft_head=codes))
        with LLM(str(tmp_path / f"engine-{codes}")) as llm:
            outs = llm.generate(
                [[5, 6, 7], list(range(20, 60))], SamplingParams(max_tokens=32, ignore_eos=True)
            )
            found.append([out.token_ids for out in outs])
    assert found[0] == found[1]


def test_ranks_have_parts_of_the_rounded_head(tiny_checkpoint: Get, tmp_path: Path) -> None:
    source, sizes = tiny_checkpoint("qwen3_5_divisible"), {"max_len": 64, "max_rows": 1}
    build(source, tmp_path / "one", Options(**sizes, draft_head="int4"))
    build(source, tmp_path / "two", Options(**sizes, draft_head="int4", tp=2))
    whole = load_file(tmp_path / "one" / "weights.safetensors")["own_head.weight"]
    parts = [load_file(tmp_path / "two" / f"weights.rank{n}.safetensors")["own_head.weight"] for n in (0, 1)]
    assert torch.equal(torch.cat(parts), whole)


def test_an_engine_for_gpus_reads_it_with_the_kernels_of_quantised_weights(tiny_engine: Get) -> None:
    found = manifest.load(tiny_engine("qwen3_5", arch="sm_90", draft_head="int4"))
    assert [(call.op, call.form) for call in found.segment("draft").head] == [
        ("linear", "coded"),
        ("linear_argmax", "coded"),
    ]
    assert {call.form for call in found.segment("trunk").head} == {"cuda"}


def test_an_engine_says_so(tiny_engine: Get, capsys: pytest.CaptureFixture) -> None:
    engine_dir = tiny_engine("qwen3_5", **BUILT | {"draft_head": "int4", "draft_vocab": FEW})
    found = manifest.load(engine_dir)
    line = f"mtp, chosen among the {FEW} lowest ids, by a copy of the head in int4"
    assert line in list(inspected.facts(engine_dir, found).columns[1].cells)
    inspect.inspect(str(engine_dir), json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["draft_head"] == found.draft_head == "int4"
    assert [(group["name"], group["stored"]) for group in said["quantised_weights"]][:-1] == [
        ("own_head.weight", "int4 by output")
    ]
