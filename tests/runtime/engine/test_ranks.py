"""The matrix with several ranks, as threads: what is asked of every engine (test_matrix.py), and that all
ledgers are the same after every step. tests/runtime/ranks has ranks as processes."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit.engine_hand import SMALL, EngineHand, Wanted

from hemiola.runtime.step import ranked

NEMOTRON, QWEN = "nemotron_h_divisible", "qwen3_5_moe_divisible"
CASES: dict[str, tuple[str, int, str, dict]] = {
    "plain": (NEMOTRON, 2, "plain", {}),
    "ngram, chunks": (QWEN, 2, "ngram", {"max_step_tokens": 20, "max_rows": 3}),
    "mtp": (QWEN, 2, "mtp", {"num_drafts": 3}),
    "mtp, no cache": (NEMOTRON, 2, "mtp", {"prefix_cache": False, "num_pages": 9, "num_drafts": 2}),
    "mtp, chunks, two snapshots": (NEMOTRON, 2, "mtp", {"max_step_tokens": 24, "num_snapshots": 2}),
    "mtp, pipelined": (QWEN, 2, "mtp", {"pipeline_depth": 2, "max_rows": 3, "num_drafts": 3}),
    "four": (NEMOTRON, 4, "mtp", {"num_drafts": 3, "max_rows": 3}),
    "four, pipelined": (QWEN, 4, "mtp", {"num_drafts": 2, "pipeline_depth": 1, "max_step_tokens": 40}),
}


@pytest.fixture(autouse=True)
def every_step_is_compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ranked, "CHECKED_EVERY", 1)
    yield


@pytest.mark.parametrize(("family", "tp", "kind", "options"), CASES.values(), ids=CASES)
def test_ranks_keep_every_promise(
    engine_hands: Callable[..., EngineHand],
    wanted: Wanted,
    family: str,
    tp: int,
    kind: str,
    options: dict,
) -> None:
    """Tokens are the oracle's; logits, drafts, pages and slots of the first rank the plain run's."""
    dice = random.Random(str(options))
    given = {"max_rows": 4, "max_len": 6 * SMALL["page_len"]} | options
    hand = engine_hands(family, kind, SMALL | {"num_drafts": 3, "tp": tp}, **given)
    page_len, asked = hand.config.page_len, {}
    for turn in range(40):
        if turn % 4 == 0 and turn < 28:
            text = wanted.story(family, turn % 3, 100)
            length = dice.choice([3, page_len, page_len + 1, 2 * page_len + 5])
            request_id = hand.submit(text[:length], max_tokens=10)
            asked[request_id] = text[length : length + 10]
        hand.turn()
        if turn % 7 == 6 and hand.loop.scheduler.running:
            hand.preempt(dice.choice(hand.loop.scheduler.running))
    hand.end()
    for request_id, expected in asked.items():
        hand.check(request_id, expected)
    assert hand.ranks is not None and hand.ranks.num_compared >= 20


def test_ranks_choose_alike_by_any_rules(engine_hands: Callable[..., EngineHand], wanted: Wanted) -> None:
    """Rules travel with openings; logits are gathered where one asks for them."""
    hand = engine_hands(QWEN, "mtp", SMALL | {"num_drafts": 3, "tp": 2}, max_rows=4, num_drafts=2)
    text = wanted.story(QWEN, 0, 100)
    asked = [
        {"temperature": 0.8, "seed": 5, "top_p": 0.9, "logprobs": 3},
        {"repetition_penalty": 1.3, "logit_bias": {7: 3.0}},
        {"logprobs": 2},
        {},
    ]
    for params in asked:
        hand.submit(text[:20], max_tokens=12, **params)
    hand.end()
    hand.check(4, text[20:32])


@pytest.mark.parametrize(("family", "tp"), [(QWEN, 2), (NEMOTRON, 4)])
def test_prompts_are_scored_by_all_ranks_together(
    engine_hands: Callable[..., EngineHand], wanted: Wanted, family: str, tp: int
) -> None:
    """In chunks, beside rows with other rules, with a preemption; the plain run's values (`hand.end`)."""
    built = SMALL | {"num_drafts": 3, "tp": tp}
    page_len = built["page_len"]
    hand = engine_hands(family, "mtp", built, max_rows=4, num_drafts=2, max_step_tokens=page_len - 1)
    text = wanted.story(family, 0, 100)
    lengths = (1, 2, page_len + 3, 3 * page_len + 1)
    for num_top, length in enumerate(lengths):
        hand.submit(text[:length], max_tokens=4, prompt_logprobs=num_top, temperature=float(num_top), seed=1)
        hand.submit(text[: length + 1], max_tokens=6, logprobs=2)
    for turn in range(12):
        hand.turn()
        if turn == 7:
            hand.preempt(hand.loop.scheduler.running[-1])
    hand.end()
    asked = [request for request in hand.requests if request.params.prompt_logprobs is not None]
    assert [len(request.prompt_logprobs) + 1 for request in asked] == [*lengths]


def conversations(hand: EngineHand, texts: list[list[int]], page_len: int) -> list[int]:
    """Three in turns, and room for one; returns where the answers began."""
    begun = []
    for length in range(2 * page_len, 5 * page_len, page_len):
        for text in texts:
            request_id = hand.submit(text[:length], max_tokens=5)
            hand.run()
            hand.check(request_id, text[length : length + 5])
            begun.append(hand.requests[request_id - 1].metrics.cached_tokens)
    return begun


@pytest.mark.parametrize(("family", "tp"), [(NEMOTRON, 2), (QWEN, 4)])
def test_what_ranks_keep_on_the_host_and_in_a_file_is_the_same_text(
    engine_hands: Callable[..., EngineHand], wanted: Wanted, tmp_path: Path, family: str, tp: int
) -> None:
    """A unit holds all ranks' parts of a page; the next engine finds them in the file."""
    built = SMALL | {"num_drafts": 3, "tp": tp}
    page_len, tiers = built["page_len"], {"disk_cache_dir": str(tmp_path), "disk_cache_bytes": 2**25}
    sizes = {"max_rows": 2, "max_len": 6 * page_len, "num_pages": 13, "num_snapshots": 2, "num_drafts": 3}
    texts = [wanted.story(family, number, 100) for number in range(3)]
    for is_restarted in (False, True):
        hand = engine_hands(family, "mtp", built, host_cache_bytes=2**25, **sizes, **tiers)
        begun = conversations(hand, texts, page_len)
        assert min(begun[3:]) > 0 and (begun[0] > 0) == is_restarted, begun
        hand.check_logits()
        hand.check_contents()
        prefix = hand.loop.scheduler.prefix
        assert prefix.host is not None and prefix.host.statistics.num_hits > 1 and prefix.disk is not None
        assert hand.ranks is not None and hand.ranks.num_moves > 10
        prefix.save()
        prefix.disk.close()
        prefix.disk = None
