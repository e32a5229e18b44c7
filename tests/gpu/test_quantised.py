"""Quantised engines on a GPU, of each canonical group: bits are the plain run's, logits those of the numbers.

The bundled checkpoints, rounded as releases are.
"""

import random
from pathlib import Path

import pytest
import torch
from kit import quantised
from kit.engine_hand import EngineHand
from kit.gpu_engines import DEMO, MARKS, PAGE, SIZES, Engines
from kit.harness import Harness
from kit.quantised import RECIPES, Copies
from oracle import Oracle

pytestmark = MARKS
TOLERANCE = 0.05  # of the largest logit, as plain bf16 engines have (test_engine.py)
GROUPS = {  # recipe and checkpoint by group
    "e4m3": ("qwen_fp8", "qwen3.5-code"),
    "e4m3 by tensor": ("modelopt_fp8", "nemotron-h-code"),
    "e2m1": ("modelopt_nvfp4", "nemotron-h-code"),
    "int4 with zero points": ("compressed_w4a16_asym", "qwen3.5-code"),
    "int8": ("compressed_w8a16", "qwen3.5-code"),
}


@pytest.fixture(scope="module", params=GROUPS)
def copies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Copies:
    recipe, family = GROUPS[request.param]
    folder = tmp_path_factory.mktemp("quantised") / recipe
    folder.mkdir()
    return quantised.quantise(DEMO / family, folder, RECIPES[recipe])


def engine_of(engines: Engines, copy: Path, **options: object) -> Path:
    """In a folder of the copy's own: checkpoints are told apart by their names alone."""
    return Engines(copy.parent / "engines").engine(copy, **SIZES | options)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("kind", ["plain", "ngram", "mtp"])
def test_steps_shared_with_anybody_give_the_plain_runs_bits(
    engines: Engines, copies: Copies, kind: str, graphs: bool
) -> None:
    """Batches, chunked prompts, drafts, hits, two steps under way."""
    engine_dir = engine_of(engines, copies.quantised)
    plain = engines.plain(engine_dir)
    text = plain.greedy(random.Random(1).choices(range(3, 300), k=20), 3 * PAGE + 20)
    sizes = {"max_step_tokens": 90, "max_rows": 5, "pipeline_depth": 2, "cuda_graphs": graphs}
    hand = EngineHand(engine_dir, plain, kind, **sizes)
    for _ in range(2):
        for length in (20, 31, 32, 33, PAGE - 1, PAGE + 1, 2 * PAGE + 5, 3 * PAGE):
            hand.submit(text[:length], max_tokens=20)
        hand.run()
    for request in hand.requests:
        hand.check(request.id, text[request.prompt_len : request.prompt_len + 20])
    hand.end()


def test_logits_are_those_of_the_dequantised_weights(engines: Engines, copies: Copies) -> None:
    """Within bf16; engines in fp32 to the last bit."""
    tokens = random.Random(2).choices(range(3, 300), k=90)
    found, wanted = (
        Harness(engine_of(engines, copies.quantised)).run(tokens).cpu(),
        Oracle(copies.twin).logits(tokens),
    )
    error = ((found - wanted).abs().max() / wanted.abs().max()).item()
    print(f"error {error:.4f} of the largest logit")
    assert error < TOLERANCE
    wide = [
        Harness(engine_of(engines, copy, dtype="float32")).run(tokens)
        for copy in (copies.quantised, copies.twin)
    ]
    assert torch.equal(*wide)
