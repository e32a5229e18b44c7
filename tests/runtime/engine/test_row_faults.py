"""An exception in one row's own data ends that row; the others say what the oracle says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.fake_session import VOCAB, FakeSession, hashed, oracle, resolved
from kit.guided import EOS, compiled, guided_oracle, tokenizer
from kit.hand import Hand
from kit.proposers import always_right

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.choose import rule
from hemiola.runtime.choose.grammar import Stuck
from hemiola.runtime.schedule import outbox
from hemiola.runtime.schedule.request import Bounds, new_request
from hemiola.runtime.step import output
from hemiola.runtime.text import Text

PROMPTS = [[1, 2], [3, 4], [5, 6, 7]]
PATTERN = "[a-f]{2,}x?"
NUM_TOKENS = 12


def fails(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("sabotaged")


def a_hand(make_hand: Callable[..., Hand], text: Text | None = None, **sizes: int) -> Hand:
    session = FakeSession(resolved(num_drafts=2, **sizes))
    return make_hand(text, session=session, proposer=always_right(hashed))


def check(hand: Hand, bad: int, good: list[tuple[int, list[int]]]) -> None:
    """Nothing is left of the row that failed: the same prompt again is served."""
    hand.run()
    assert hand.last(bad).finish_reason == "error" and "sabotaged" in str(hand.last(bad).error)
    for request_id, wanted in good:
        assert hand.token_ids(request_id) == wanted and hand.last(request_id).error is None
    again = hand.submit(PROMPTS[1], max_tokens=9)
    hand.run()
    assert hand.token_ids(again) == oracle(PROMPTS[1], 9)


def neighbours(hand: Hand) -> list[tuple[int, list[int]]]:
    plain = hand.submit(PROMPTS[0], max_tokens=NUM_TOKENS)
    told = hand.submit(PROMPTS[2], max_tokens=NUM_TOKENS, logprobs=1)
    return [(plain, oracle(PROMPTS[0], NUM_TOKENS)), (told, oracle(PROMPTS[2], NUM_TOKENS))]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("turns", [0, 2])
def test_logprobs_that_cannot_be_read_end_one_row(
    make_hand: Callable[..., Hand], monkeypatch: pytest.MonkeyPatch, turns: int, depth: int
) -> None:
    hand, right = a_hand(make_hand, pipeline_depth=depth), output.to_logprobs
    good, bad = neighbours(hand), hand.submit(PROMPTS[1], max_tokens=NUM_TOKENS, logprobs=3)
    for _ in range(turns):
        hand.turn()

    def to_logprobs(token_ids: list[int], *parts: Any) -> Any:
        return (fails if parts[1].shape[1] == 3 else right)(token_ids, *parts)

    monkeypatch.setattr(output, "to_logprobs", to_logprobs)
    check(hand, bad, good)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_grammar_that_raises_ends_one_row(make_hand: Callable[..., Hand], depth: int) -> None:
    hand, options = a_hand(make_hand, pipeline_depth=depth), {"max_tokens": 12, "stop_token_ids": [EOS]}
    good, asked = neighbours(hand), hand.submit(PROMPTS[2], compiled(PATTERN), **options)
    bad = hand.submit(PROMPTS[1], compiled(PATTERN), **options)
    hand.turn()
    own = hand.requests[bad - 1]
    assert own.guide is not None and own.finish_reason is None
    own.guide.follow = fails
    check(hand, bad, [*good, (asked, guided_oracle(PROMPTS[2], 12, PATTERN))])


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("turns", [1, 4])
def test_a_grammar_that_is_stuck_ends_one_row_with_its_own_words(
    make_hand: Callable[..., Hand], depth: int, turns: int
) -> None:
    """The users need no name of a Python class."""
    hand, options = a_hand(make_hand, pipeline_depth=depth), {"max_tokens": 12, "stop_token_ids": [EOS]}
    good, bad = neighbours(hand), hand.submit(PROMPTS[1], compiled(PATTERN), **options)
    for _ in range(turns):
        hand.turn()
    own = hand.requests[bad - 1]
    assert own.guide is not None and own.finish_reason is None
    said = hand.token_ids(bad)

    def stuck(*_: object) -> int:
        raise Stuck("sabotaged")

    own.guide.follow = stuck
    check(hand, bad, good)
    assert hand.last(bad).error == "structured_outputs: sabotaged; change one of them"
    refused = hand.last(bad).refused
    assert refused is not None and (refused.code, refused.field) == ("conflict", "structured_outputs")
    output = guided_oracle(PROMPTS[1], 12, PATTERN)
    assert hand.token_ids(bad) == output[: len(hand.token_ids(bad))] and len(hand.token_ids(bad)) >= len(said)


class Panic(BaseException):
    """What libraries in Rust raise: no Exception."""


@pytest.mark.parametrize("error", [ValueError, Panic])
def test_a_tokenizer_that_panics_ends_one_row(
    make_hand: Callable[..., Hand], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type
) -> None:
    """When a request opens, and when its text grows."""
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    hand, right = a_hand(make_hand, Text(tmp_path)), outbox.Growing
    good = neighbours(hand)

    def panics(*_: object, **__: object) -> Any:
        raise error("sabotaged")

    def growing(text: Text, prompt: list[int], stop: Any) -> Any:
        return panics() if prompt == PROMPTS[1] else right(text, prompt, stop)

    with monkeypatch.context() as patched:
        patched.setattr(outbox, "Growing", growing)
        bad = hand.submit(PROMPTS[1], max_tokens=NUM_TOKENS)
        hand.turn()
    assert "the tokenizer failed: " in str(hand.last(bad).error) and hand.token_ids(bad) == []
    late = hand.submit(PROMPTS[1], max_tokens=NUM_TOKENS)
    hand.turn()
    growing_text = hand.loop.outbox._letters[late].growing
    assert growing_text is not None and not hand.ended(late)
    growing_text.push = panics
    check(hand, late, good)


@pytest.mark.parametrize("error", [ValueError, Panic])
def test_a_grammar_library_that_panics_ends_one_row(make_hand: Callable[..., Hand], error: type) -> None:
    hand, options = a_hand(make_hand), {"max_tokens": 12, "stop_token_ids": [EOS]}
    good, bad = neighbours(hand), hand.submit(PROMPTS[1], compiled(PATTERN), **options)
    hand.turn()

    def panics(*_: object) -> int:
        raise error("sabotaged")

    hand.requests[bad - 1].guide.follow = panics
    check(hand, bad, good)


def test_a_prompt_that_the_tokenizer_cannot_decode_ends_one_row(
    make_hand: Callable[..., Hand], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    hand, right = a_hand(make_hand, Text(tmp_path)), outbox.Growing
    good = neighbours(hand)
    hand.turn()

    def growing(text: Text, prompt: list[int], stop: Any) -> Any:
        return (fails if prompt == PROMPTS[1] else right)(text, prompt, stop)

    monkeypatch.setattr(outbox, "Growing", growing)
    bad = hand.submit(PROMPTS[1], max_tokens=NUM_TOKENS)
    hand.turn()
    monkeypatch.setattr(outbox, "Growing", right)
    check(hand, bad, good)


@pytest.mark.parametrize("name", ["lists_of", "numbers_of"])
def test_a_rule_that_cannot_be_made_is_its_callers_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It is made before the request is queued: a step only puts such arrays together."""
    bounds = Bounds(64, 64, VOCAB, ())
    assert new_request(1, PROMPTS[0], SamplingParams(), bounds)
    monkeypatch.setattr(rule, name, fails)
    with pytest.raises(ZeroDivisionError):
        new_request(1, PROMPTS[0], SamplingParams(), bounds)


def test_a_step_makes_no_rule_again(make_hand: Callable[..., Hand], monkeypatch: pytest.MonkeyPatch) -> None:
    hand = a_hand(make_hand)
    options = {"temperature": 0.7, "seed": 3, "bad_words_ids": [[1, 2], [3]], "logit_bias": {5: 1.0}}
    for prompt in PROMPTS:
        hand.submit(prompt, max_tokens=9, min_tokens=3, stop_token_ids=[4], **options)
    for name in ("lists_of", "numbers_of"):
        monkeypatch.setattr(rule, name, fails)
    hand.run()
    assert all(hand.last(request_id).error is None for request_id in hand.pieces)
