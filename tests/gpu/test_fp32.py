"""Engines in fp32 on a GPU: greedy tokens are those of transformers in fp32, whoever shares a step.

Of the bundled checkpoints and of a tiny one of each kind; `-m more`: of every other family (three_convs,
which transformers does not know, has the oracle). Bits are the plain run's, as everywhere.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from kit import checkpoints
from kit.engine_hand import EngineHand
from kit.gpu_engines import DEMO, FAMILIES, MARKS, PAGE, SIZES, START, Engines
from oracle import Oracle
from tokenizers import Tokenizer

pytestmark = MARKS
TOLERANCE = 1e-4  # of the largest logit: fp32, sums in another order
LENGTHS = (1, 15, 16, 17, PAGE - 1, PAGE + 1, 2 * PAGE + 5)
NUM_TOKENS = 40
FIRST = [*FAMILIES, "nemotron_h_moe", "qwen3_next"]
MORE = [name for name in checkpoints.FAMILIES | checkpoints.TEST_FAMILIES if name not in FIRST]


@pytest.fixture(
    scope="module", params=[*FIRST, *(pytest.param(name, marks=pytest.mark.more) for name in MORE)]
)
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> Path:
    return DEMO / request.param if request.param in FAMILIES else tiny_checkpoint(request.param)


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """Logits of a text, on the CPU: where tensors are fp32 a GPU's libraries may multiply in TF32."""
    if checkpoint.name in checkpoints.TEST_FAMILIES:
        return Oracle(checkpoint).logits
    model = checkpoints.reference(checkpoint)

    def logits(text: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([text]), use_cache=False).logits[0]

    return logits


def prompts(checkpoint: Path) -> list[list[int]]:
    """Of code for who has learned it, random ones for others."""
    if checkpoint.parent == DEMO:
        text = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(START * 20).ids
    else:
        text = random.Random(1).choices(range(checkpoints.VOCAB), k=max(LENGTHS))
    return [text[:length] for length in LENGTHS]


@pytest.mark.parametrize("kind", ["plain", "mtp"])
def test_greedy_tokens_are_those_of_transformers(
    engines: Engines, checkpoint: Path, truth: Callable[[Sequence[int]], torch.Tensor], kind: str
) -> None:
    """In steps of all requests, in graphs, with hits, drafts and prompts in pieces."""
    engine_dir = engines.engine(checkpoint, **SIZES | {"dtype": "float32"})
    options = {"max_step_tokens": 90, "max_rows": 5, "pipeline_depth": 1, "cuda_graphs": True}
    hand, worst = EngineHand(engine_dir, engines.plain(engine_dir), kind, **options), 0.0
    for _ in range(2):
        for prompt in prompts(checkpoint):
            hand.submit(prompt, max_tokens=NUM_TOKENS)
        hand.run()
    hand.end()
    for request, prompt in zip(hand.requests, prompts(checkpoint) * 2, strict=True):
        text = prompt + hand.token_ids(request.id)
        wanted = truth(text)
        hand.check(request.id, wanted[len(prompt) - 1 : -1].argmax(1).tolist())
        found = hand.plain.logits(text)[:, : wanted.shape[1]].cpu()
        worst = max(worst, ((found - wanted).abs().max() / wanted.abs().max()).item())
    print(f"{checkpoint.name}: logits differ by up to {worst:.1e} of the largest")
    assert worst < TOLERANCE
