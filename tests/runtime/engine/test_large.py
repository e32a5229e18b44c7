"""Engines with more rows, longer prompts and larger vocabularies than any other test has."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from kit import checkpoints
from kit.engine_hand import CHUNK, SMALL, Wanted

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.llm import LLM
from hemiola.runtime.text import LONG_TEXT

ROWS = 67


@torch.no_grad()
def best(checkpoint: Path, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """What transformers would have chosen in the place of each token of the output."""
    model = checkpoints.reference(checkpoint)
    ids = torch.tensor([[*prompt, *output]])
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(output) + 1).logits[0]
    return logits[:-1].argmax(1).tolist()


@pytest.mark.parametrize(("family", "kind"), [("nemotron_h_moe", "ngram"), ("qwen3_5", "mtp")])
def test_67_rows_in_one_step(engine_hands: Callable, wanted: Wanted, family: str, kind: str) -> None:
    """Prompts of any length, and outputs of any, so that rows come and go."""
    built = SMALL | {"max_rows": ROWS, "max_step_tokens": 512, "max_len": 256, "num_drafts": 2}
    hand, text, dice = engine_hands(family, kind, built, num_drafts=2), wanted.story(family), random.Random(0)
    asked = {}
    for _ in range(ROWS + 9):
        length, num = dice.randrange(3, 3 * CHUNK), dice.randrange(10, 20)
        asked[hand.submit(text[:length], max_tokens=num)] = text[length : length + num]
    most = 0
    while hand.goes_on():
        most = max(most, len(hand.loop.scheduler.running))
    for request_id, expected in asked.items():
        hand.check(request_id, expected)
    assert most == ROWS


@pytest.mark.parametrize("family", ["nemotron_h_varied", "qwen3_5_varied"])
def test_a_text_of_more_than_4096_characters_and_tokens(
    tiny_checkpoint: Callable, tiny_engine: Callable, family: str
) -> None:
    """The second time behind a hit of nearly all; then the last ids of the vocabulary."""
    from transformers import AutoTokenizer

    checkpoint = tiny_checkpoint(family)
    engine = tiny_engine(family, max_len=6144, max_step_tokens=1024, max_rows=2)
    text = " ".join(f"return {n} if self" for n in range(450))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(engine) as llm:
        ids, vocab = llm.encode(text), llm.manifest.vocab_size
        assert ids == AutoTokenizer.from_pretrained(checkpoint)(text).input_ids
        assert len(text) > 2 * LONG_TEXT and len(ids) > LONG_TEXT
        for prompt in (ids, [*ids, 5], [vocab - 1, 5, vocab - 2, vocab - 3]):
            (outcome,) = llm.generate([prompt], params)
            assert outcome.token_ids == best(checkpoint, prompt, outcome.token_ids)
            assert (outcome.metrics.cached_tokens > LONG_TEXT) == (len(prompt) == len(ids) + 1)
