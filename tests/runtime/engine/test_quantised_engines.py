"""Engines of quantised checkpoints: every bit is that of the engine of the same numbers in fp32."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import checkpoints, quantised
from kit.harness import Harness
from kit.ops import same_bits
from kit.quantised import RECIPES
from oracle import Oracle

from hemiola import LLM, SamplingParams
from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.runtime import manifest

Get = Callable[..., Path]
SIZES = {"max_len": 256, "max_rows": 4, "max_step_tokens": 128, "page_len": 32, "num_drafts": 2}
KINDS = {  # of every format one, over all families; and the layouts that its engine has
    ("qwen_fp8", "qwen3_next"): {"e4m3 32", "e4m3 row"},
    ("qwen_fp8", "qwen3_5_moe"): {"e4m3 32", "e4m3 row"},
    ("modelopt_mixed", "qwen3_5_moe_experts"): {"e4m3 row", "e2m1 16 factor"},
    ("modelopt_nvfp4", "nemotron_h_moe"): {"e2m1 16 factor"},
    ("compressed_nvfp4", "nemotron_h_dense"): {"e2m1 16 divisor"},
    ("compressed_int8", "nemotron_h_dense"): {"int8 row"},
    ("compressed_w4a16_asym", "qwen3_5_moe_experts"): {"int4 32 zeros", "int4 row zeros"},
    ("gptq_v2", "nemotron_h_moe"): {"int8 16 zeros"},
    ("auto_round", "qwen3_5"): {"int4 32"},
    ("awq", "qwen3_next"): {"int4 32 zeros", "int4 row zeros"},
}


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def engines(
    request: pytest.FixtureRequest, tiny_checkpoint: Get, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Of a quantised checkpoint and of its twin."""
    recipe, family = request.param
    folder = tmp_path_factory.mktemp("engines")
    copies = quantised.quantise(tiny_checkpoint(family), folder, RECIPES[recipe])
    for copy in (copies.quantised, copies.twin):
        build(copy, folder / f"{copy.name}-engine", Options(**SIZES))
    return folder / "quantised-engine", folder / "twin-engine"


def test_logits_and_drafts_have_the_bits_of_the_twin(engines: tuple[Path, Path]) -> None:
    """Prompts of every cut and tokens one by one, through layers, experts, heads and MTP heads."""
    ours, theirs = map(Harness, engines)
    tokens = random.Random(1).choices(range(3, 300), k=90)
    expected, hidden = theirs.run(tokens), theirs.hidden
    for cuts in ((), (1,) * 89, (17, 1, 30, 2)):
        assert same_bits(ours.run(tokens, *cuts), expected), cuts
        ours.forget()
    ours.run(tokens)
    assert same_bits(ours.hidden, hidden)
    drafted = []
    for harness in (ours, theirs):
        drafted += [*harness.draft(harness.requests[-1], tokens[1:40], hidden[:39], 1)]
    assert same_bits(drafted[0], drafted[2]) and same_bits(drafted[1], drafted[3])


def test_greedy_text_is_that_of_the_twin(engines: tuple[Path, Path]) -> None:
    """With drafts, hits and rows beside each other."""
    rng = random.Random(2)
    story = rng.choices(range(3, 300), k=70)
    prompts = [story[:n] for n in (70, 33, 64, 5)] + [rng.choices(range(3, 300), k=20)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(str(engines[1]), drafts="none", prefix_cache=False) as llm:
        expected = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    with LLM(str(engines[0]), drafts="mtp") as llm:
        for _ in range(2):
            assert [out.token_ids for out in llm.generate(prompts, params)] == expected


def test_the_manifest_says_what_is_quantised(
    engines: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    ours, theirs = (manifest.load(folder) for folder in engines)
    wanted = KINDS[request.node.callspec.params["engines"]]
    found = {text for segment in ours.segments for text in segment.layouts.values()}
    assert found == wanted and ours.identity != theirs.identity
    assert not any(segment.layouts for segment in theirs.segments)
    small, large = ((f / m.weights_file).stat().st_size for f, m in zip(engines, (ours, theirs), strict=True))
    assert small < 0.8 * large


CLOSE = [("qwen_fp8", "qwen3_5_moe"), ("modelopt_nvfp4", "nemotron_h_moe")]
CLOSE += [("compressed_w4a16_asym", "qwen3_5"), ("compressed_int8", "nemotron_h_dense")]


@pytest.mark.parametrize(("recipe", "family"), CLOSE, ids=map("-".join, CLOSE))
def test_logits_are_no_worse_than_transformers_in_bf16(
    recipe: str, family: str, tiny_checkpoint: Get, tiny_engine: Get
) -> None:
    """Against fp64 of the numbers that the codes stand for; of every group one."""
    copy = tiny_checkpoint(f"{recipe}+{family}")
    tokens = random.Random(3).choices(range(3, 300), k=60)
    truth = Oracle(copy.parent / "twin", dtype=torch.float64).logits(tokens)
    model = checkpoints.reference(copy.parent / "twin").bfloat16()
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    ours = Harness(tiny_engine(f"{recipe}+{family}")).run(tokens)
    far = (theirs.double() - truth).abs()
    assert (ours.double() - truth).abs().max() < 1e-3 * far.max() and far.max() > 0
