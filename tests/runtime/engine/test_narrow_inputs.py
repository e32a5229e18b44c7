"""Engines whose FP8 layers have inputs in e4m3: every bit is the plain run's, in every family."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import quantised
from kit.harness import Harness
from kit.ops import same_bits
from kit.quantised import ALL, HEAD, NEVER, QWEN_FP8, RECIPES, Recipe, Written

from hemiola import LLM, SamplingParams
from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.runtime import manifest
from hemiola.runtime.cli.inspected import described
from hemiola.runtime.config import ServeConfig

Get = Callable[..., Path]
SIZES = {"max_len": 256, "max_rows": 4, "max_step_tokens": 128, "page_len": 32, "num_drafts": 2}


def static(w: torch.Tensor) -> Written:
    """With room for inputs up to 14, and more for some layers."""
    made = quantised.fp8_tensor(w)
    return made._replace(tensors=made.tensors | {"input_scale": torch.tensor(w.shape[1] / 2048)})


BY_TOKEN = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
CHANNELS = RECIPES["compressed_fp8"].config
CHANNELS = CHANNELS | {
    "config_groups": {"group_0": CHANNELS["config_groups"]["group_0"] | {"input_activations": BY_TOKEN}}
}
BLOCKS = QWEN_FP8 | {"weight_block_size": [128, 128]}
W8A8 = {
    "group": Recipe(BLOCKS, (NEVER, HEAD, (ALL, quantised.fp8_block()))),
    "token": Recipe(CHANNELS, (NEVER, HEAD, (ALL, quantised.fp8_channel))),
    "static": Recipe(RECIPES["modelopt_fp8"].config, (NEVER, HEAD, (ALL, static))),
}
KINDS = [
    ("group", "qwen3_5_moe"), ("static", "qwen3_5_moe"), ("token", "qwen3_next"),
    ("static", "qwen3_5"), ("group", "nemotron_h_moe"), ("token", "nemotron_h_dense"),
]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def engines(
    request: pytest.FixtureRequest, tiny_checkpoint: Get, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Of one checkpoint: with inputs in e4m3, and with wide ones."""
    by, family = request.param
    folder = tmp_path_factory.mktemp("engines")
    copies = quantised.quantise(tiny_checkpoint(family), folder, W8A8[by])
    for kind in ("fp8", "auto"):
        build(copies.quantised, folder / kind, Options(act_dtype=kind, **SIZES))
    return folder / "fp8", folder / "auto"


def test_logits_are_those_of_tokens_one_by_one(engines: tuple[Path, Path]) -> None:
    """And near those of wide inputs, but not the same."""
    ours, wide = map(Harness, engines)
    tokens = random.Random(1).choices(range(3, 300), k=90)
    expected = ours.run(tokens, *(1,) * 89)
    for cuts in ((), (17, 1, 30, 2)):
        ours.forget()
        assert same_bits(ours.run(tokens, *cuts), expected), cuts
    theirs = wide.run(tokens)
    distance = torch.linalg.norm(expected - theirs) / torch.linalg.norm(theirs)
    assert 0.001 < distance < 0.5


def test_tokens_are_those_of_the_plain_run(engines: tuple[Path, Path]) -> None:
    """With drafts, hits, chunks, and rows beside each other."""
    rng = random.Random(2)
    story = rng.choices(range(3, 300), k=70)
    prompts = [story[:n] for n in (70, 33, 64, 5)] + [rng.choices(range(3, 300), k=20)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0)
    with LLM(str(engines[0]), drafts="none", prefix_cache=False) as llm:
        expected = [_of(llm.generate([prompt], params)[0]) for prompt in prompts]
    for drafts, tokens in (("mtp", 128), ("ngram", 24)):
        with LLM(str(engines[0]), drafts=drafts, max_step_tokens=tokens) as llm:
            for _ in range(2):
                assert [_of(out) for out in llm.generate(prompts, params)] == expected


def _of(out) -> tuple:
    return out.token_ids, out.logprobs


def test_the_manifest_names_them(engines: tuple[Path, Path], request: pytest.FixtureRequest) -> None:
    ours, wide = (manifest.load(folder) for folder in engines)
    by, _ = request.node.callspec.params["engines"]
    layouts = {text for segment in ours.segments for text in segment.layouts.values()}
    assert layouts == {f"e4m3 row x e4m3 by {by}"}
    assert (ours.act_dtype, wide.act_dtype) == ("fp8", "float32") and ours.identity != wide.identity
    forms = {node.form for segment in ours.segments for node in segment.nodes if node.op == "linear"}
    assert forms == {"compiled_e4m3", "compiled"}
    assert described(engines[0], ours, ServeConfig())["act_dtype"] == "fp8"
