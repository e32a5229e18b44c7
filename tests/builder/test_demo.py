"""The bundled checkpoints: trained weights, real text."""

from pathlib import Path

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
def harness(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    folder = tmp_path_factory.mktemp("demo") / "engine"
    build(demo, folder, Options(max_len=512, max_rows=2, max_step_tokens=256))
    return Harness(folder)


@pytest.fixture(scope="module")
def tokens(demo: Path) -> list[int]:
    return Tokenizer.from_file(str(demo / "tokenizer.json")).encode(TEXT).ids


@torch.no_grad()
def test_logits_and_mtp_equal_transformers(
    demo: Path, harness: Harness, reference: torch.nn.Module, tokens: list[int]
) -> None:
    whole, expected = harness.run(tokens), reference(input_ids=torch.tensor([tokens])).logits[0]
    assert (whole - expected).abs().max() < TOLERANCE
    for cuts in ((63, 2, *[1] * 20), (1, 62, 2, *[1] * 8)):
        harness.forget()
        assert torch.equal(harness.run(tokens, *cuts), whole)
    harness.forget()
    request = harness.request()
    harness.step([(request, tokens, 0)])
    logits, hidden = harness.draft(request, tokens[1:], harness.hidden[:-1], 1)
    expected, expected_hidden = composed.mtp(demo, reference, tokens)
    assert (logits - expected).abs().max() < TOLERANCE and (hidden - expected_hidden).abs().max() < TOLERANCE
    guessed = logits[:-1].argmax(1)
    assert (guessed == torch.tensor(tokens[2:])).float().mean() > 0.2  # a head that was trained for this


@torch.no_grad()
def test_oracle_equals_transformers(demo: Path, reference: torch.nn.Module, tokens: list[int]) -> None:
    prompt = tokens[:25]
    found = Oracle(demo).generate(prompt, max_tokens=40).token_ids
    logits = reference(input_ids=torch.tensor([prompt + found])).logits[0]
    assert found == logits[len(prompt) - 1 : -1].argmax(1).tolist()
