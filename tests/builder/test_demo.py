"""The bundled checkpoints: trained weights, real text."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from kit import checkpoints, composed
from kit.harness import Harness
from oracle import Oracle
from tokenizers import Tokenizer

from hemiola.builder.build import Options, build

DEMO = Path(__file__).resolve().parents[2] / "demo"
TOLERANCE = 1e-4  # fp32, another order of sums than transformers'
TEXT = '''
class Stack:
    """A last-in, first-out list with an optional limit."""

    def __init__(self, limit=None):
        self.items = []
        self.limit = limit

    def push(self, item):
        if self.limit is not None and len(self.items) >= self.limit:
            raise OverflowError(f"stack is full: {self.limit}")
        self.items.append(item)

    def pop(self):
        return self.items.pop()
'''


@pytest.fixture(scope="module", params=["nemotron-h-code", "qwen3.5-code"])
def demo(request: pytest.FixtureRequest) -> Path:
    return DEMO / request.param


@pytest.fixture(scope="module")
def reference(demo: Path) -> torch.nn.Module:
    return checkpoints.reference(demo)


@pytest.fixture(scope="module")
def engine(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Harness]:
    def get(numerics: str, drafts: Literal["ngram", "mtp"]) -> Harness:
        folder = tmp_path_factory.mktemp("demo") / numerics
        build(
            demo,
            folder,
            Options(numerics=numerics, max_len=512, max_rows=2, max_step_tokens=256, drafts=drafts),
        )
        return Harness(folder)

    return get


@pytest.fixture(scope="module")
def tokens(demo: Path) -> list[int]:
    return Tokenizer.from_file(str(demo / "tokenizer.json")).encode(TEXT).ids


@torch.no_grad()
def test_logits_and_mtp_equal_transformers(
    demo: Path, engine: Callable[[str, str], Harness], reference: torch.nn.Module, tokens: list[int]
) -> None:
    expected = reference(input_ids=torch.tensor([tokens])).logits[0]
    harness = engine("fast", "mtp")
    assert (harness.run(tokens, 63, 2, *[1] * 20) - expected).abs().max() < TOLERANCE
    request = harness.request()
    harness.step([(request, tokens, 0)])
    batch = harness.draft_batch(request, tokens[1:], harness.hidden[:-1], 0)
    logits, hidden = harness.call("draft", batch)
    expected, expected_hidden = composed.mtp(demo, reference, tokens)
    assert (logits - expected).abs().max() < TOLERANCE and (hidden - expected_hidden).abs().max() < TOLERANCE
    guessed = logits[:-1].argmax(1)
    assert (guessed == torch.tensor(tokens[2:])).float().mean() > 0.2  # a head that was trained for this


def test_exact_logits_do_not_depend_on_pieces(
    engine: Callable[[str, str], Harness], tokens: list[int]
) -> None:
    harness = engine("exact", "ngram")
    assert torch.equal(harness.run(tokens, 1, 62, 2, *[1] * 8), harness.run(tokens))


@torch.no_grad()
def test_oracle_equals_transformers(demo: Path, reference: torch.nn.Module, tokens: list[int]) -> None:
    prompt = tokens[:25]
    found = Oracle(demo).generate(prompt, max_tokens=40).token_ids
    logits = reference(input_ids=torch.tensor([prompt + found])).logits[0]
    assert found == logits[len(prompt) - 1 : -1].argmax(1).tolist()
