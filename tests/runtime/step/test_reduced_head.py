"""An MTP head over the lowest ids only: other drafts, the same tokens and logits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit.engine_hand import EngineHand, Wanted
from kit.harness import Harness

from hemiola.runtime import manifest
from hemiola.runtime.cli import inspected

FEW = 100  # of some 320 ids
BUILT = {"draft_vocab": FEW, "max_step_tokens": 512, "page_len": 32, "chunk_len": 16}
FAMILIES = pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_5", "qwen3_5_tied"])
SAMPLED = {"temperature": 0.8, "top_p": 0.9}
EDITED = {"logit_bias": {7: 2.0, 310: 5.0}, "bad_words_ids": ((42,), (121, 254)), "repetition_penalty": 1.2}


@FAMILIES
def test_its_logits_are_the_first_of_the_whole_heads(tiny_engine: Callable[..., Path], family: str) -> None:
    tokens, found = list(range(3, 60)), []
    for built in (BUILT, BUILT | {"draft_vocab": None}):
        harness = Harness(tiny_engine(family, **built))
        request = harness.request()
        (trunk,) = harness.step([(request, tokens, 0)])
        found.append((trunk, *harness.draft(request, tokens[1:], harness.hidden[:-1], first=1)))
    (trunk, few, hidden), (same_trunk, logits, same_hidden) = found
    assert few.shape[1] == FEW < logits.shape[1]
    for mine, wanted in ((trunk, same_trunk), (few, logits[:, :FEW]), (hidden, same_hidden)):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("graphs", [False, True], ids=["free", "in buckets"])
@FAMILIES
def test_only_drafts_change(
    engine_hands: Callable[..., EngineHand], wanted: Wanted, family: str, graphs: bool
) -> None:
    """Beside each other: greedy, drawn and edited requests; drafts are the reduced head's own."""
    text, got = wanted.story(family), []
    for built in (BUILT, BUILT | {"draft_vocab": None}):
        hand = engine_hands(family, "mtp", built, num_drafts=3, cuda_graphs=graphs, pipeline_depth=1)
        for n, params in enumerate(({}, SAMPLED, EDITED, SAMPLED | EDITED)):
            hand.submit(text[: 9 + 8 * n], max_tokens=40, seed=n, **params)
        hand.end()
        drafts = {draft for found in hand.proposed.values() for ids, _ in found for draft in ids}
        got.append(([hand.token_ids(request.id) for request in hand.requests], max(drafts)))
    hand.check(1, text[9:49])
    (tokens, highest), (same_tokens, highest_of_all) = got
    assert tokens == same_tokens and highest < FEW < highest_of_all


def test_an_engine_says_how_many(tiny_engine: Callable[..., Path]) -> None:
    engine_dir = tiny_engine("qwen3_5", **BUILT)
    table = inspected.facts(engine_dir, manifest.load(engine_dir))
    assert f"mtp, chosen among the {FEW} lowest ids" in list(table.columns[1].cells)
