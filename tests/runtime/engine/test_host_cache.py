"""A hit on what the host keeps is a hit: every token and every logit is the plain run's."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.engine_hand import PAGE as B
from kit.engine_hand import EngineHand, Wanted

SIZES = {"max_rows": 2, "max_len": 6 * B, "num_pages": 2 * 6 + 1, "num_snapshots": 2}


def ask(hand: EngineHand, prompt: list[int], expected: list[int]) -> int:
    """Returns where the answer began."""
    request_id = hand.submit(prompt, max_tokens=len(expected))
    hand.run()
    hand.check(request_id, expected)
    return hand.requests[request_id - 1].metrics.cached_tokens


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("nemotron_h_moe", "mtp"),
        ("qwen3_5", "mtp"),
        ("qwen3_5", "plain"),
        ("three_convs", "ngram"),
        ("attention_only", "mtp"),
    ],
)
def test_conversations_that_outgrow_the_cache_go_on_where_they_ended(
    small_hand: Callable[..., EngineHand], wanted: Wanted, family: str, kind: str
) -> None:
    """Three in turns, and room for one: every turn begins behind the one before."""
    hand = small_hand(family, kind, host_cache_bytes=2**24, **SIZES)
    texts = [wanted.story(family, number) for number in range(3)]
    for length in range(2 * B, 5 * B, B // 2):
        for text in texts:
            begun = ask(hand, text[:length], text[length : length + 6])
            assert begun >= (0 if length < 3 * B else (length - 1) // B * B - B), f"{length} began at {begun}"
    host = hand.loop.scheduler.prefix.host
    assert host is not None and host.statistics.num_hits > 5 and host.statistics.evicted_units == 0
    hand.check_logits()
    hand.check_contents()


@pytest.mark.parametrize("seed", range(3))
def test_a_host_with_room_for_little_serves_what_is_right(
    small_hand: Callable[..., EngineHand], wanted: Wanted, seed: int
) -> None:
    dice = random.Random(seed)
    hand = small_hand("qwen3_5", "mtp", host_cache_bytes=2**24, **SIZES)
    host = hand.loop.scheduler.prefix.host
    assert host is not None
    host._free = host._free[: dice.randint(host.mover.units_per_slot + 1, 3 * host.mover.units_per_slot)]
    host.mover.num_units = len(host._free)
    host._free = list(range(len(host._free)))
    texts = [wanted.story("qwen3_5", number) for number in range(3)]
    for _ in range(24):
        text, length = dice.choice(texts), dice.randint(B, 5 * B)
        ask(hand, text[:length], text[length : length + 4])
    assert host.statistics.evicted_units > 0
    hand.check_logits()
    hand.check_contents()


def test_a_flush_forgets_what_the_host_keeps(small_hand: Callable[..., EngineHand], wanted: Wanted) -> None:
    hand = small_hand("qwen3_5", host_cache_bytes=2**24, **SIZES)
    host = hand.loop.scheduler.prefix.host
    for number in range(3):
        text = wanted.story("qwen3_5", number)
        ask(hand, text[: 4 * B], text[4 * B : 4 * B + 4])
    assert host is not None and host.num_free < host.mover.num_units
    hand.loop.flush()
    text = wanted.story("qwen3_5", 0)
    assert ask(hand, text[: 4 * B], text[4 * B : 4 * B + 4]) == 0
    hand.check_logits()


def test_a_restarted_engine_answers_from_its_file_bit_for_bit(
    small_hand: Callable[..., EngineHand], wanted: Wanted, tmp_path: Path
) -> None:
    sizes = SIZES | {"host_cache_bytes": 2**24, "disk_cache_dir": str(tmp_path), "disk_cache_bytes": 2**24}
    texts = [wanted.story("nemotron_h_moe", number) for number in range(3)]
    for begun in (0, 4 * B - B):
        hand = small_hand("nemotron_h_moe", "mtp", **sizes)
        for text in texts:
            assert ask(hand, text[: 4 * B], text[4 * B : 4 * B + 8]) == begun
        hand.check_logits()
        prefix = hand.loop.scheduler.prefix
        prefix.save()
        assert prefix.disk is not None
        prefix.disk.close()
        prefix.disk = None
