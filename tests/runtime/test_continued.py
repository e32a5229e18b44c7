"""A request whose first tokens another engine chose goes on as if this one had chosen all of them."""

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from kit.refused import code_and_field

from hemiola.runtime.api import Logprob, Piece, SamplingParams
from hemiola.runtime.llm import LLM

PROMPT = [5, 6, 7, 5, 6, 7, 8] * 3
NUM = 40
RULES = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 3},
    "filtered": {"temperature": 0.9, "seed": 4, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "drawn_penalties": {"temperature": 1.3, "seed": 5, "presence_penalty": 2.0, "frequency_penalty": 0.5},
    "min_tokens": {"min_tokens": 30, "temperature": 1.0, "seed": 6},
    "bad_words": {"bad_words_ids": [[9, 9], [4]], "temperature": 1.0, "seed": 8},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "regex": {"structured_outputs": {"regex": "[a-f]{3}(-[0-9]{2}){1,12}"}, "temperature": 1.0, "seed": 7},
    "json": {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}}},
}


@pytest.fixture(scope="module", params=["mtp", "ngram"])
def engines(request: pytest.FixtureRequest, engine_dir: Path) -> Iterator[tuple[LLM, LLM]]:
    """Two of one identity; the second has seen nothing of what the first computed."""
    with LLM(engine_dir, drafts="none") as first, LLM(engine_dir, drafts=request.param) as second:
        yield first, second


def told(llm: LLM, params: SamplingParams, output_ids: list[int]) -> list[Piece]:
    pieces: SimpleQueue[Piece] = SimpleQueue()
    llm.submit(PROMPT, params, pieces.put, output_ids=output_ids)
    found = [pieces.get(timeout=60)]
    while found[-1].finish_reason is None:
        found.append(pieces.get(timeout=60))
    return found


def joined(pieces: list[Piece]) -> tuple[list[int], str, list[Logprob], object]:
    scores = [score for piece in pieces for score in piece.logprobs or []]
    text = "".join(piece.text for piece in pieces)
    return [i for p in pieces for i in p.token_ids], text, scores, pieces[-1].finish_reason


@pytest.mark.parametrize("rule", RULES)
def test_the_rest_is_that_of_the_unbroken_run(engines: tuple[LLM, LLM], rule: str) -> None:
    first, second = engines
    params = SamplingParams(**{"max_tokens": NUM, **RULES[rule]})
    (whole,) = first.generate(PROMPT, params)
    assert len(whole.token_ids) > 4, "too short to be cut"
    for cut in {1, 2, len(whole.token_ids) // 2, len(whole.token_ids) - 1}:
        pieces = told(second, params, whole.token_ids[:cut])
        ids, text, scores, reason = joined(pieces)
        assert whole.token_ids[cut:] == ids and reason == whole.finish_reason, f"cut at {cut}"
        assert whole.text.endswith(text), f"cut at {cut}"
        assert scores == (whole.logprobs or [])[cut:]
        assert pieces[0].prompt_logprobs == whole.prompt_logprobs
        assert pieces[-1].metrics is not None
        assert pieces[-1].metrics.num_prompt_tokens == len(PROMPT)
        assert pieces[-1].metrics.num_output_tokens == len(whole.token_ids)


def test_a_stop_string_that_began_in_the_first_part_ends_the_second(engines: tuple[LLM, LLM]) -> None:
    first, second = engines
    letters = {"structured_outputs": {"regex": "[a-p]{50}"}, "temperature": 2.0, "seed": 3}
    pieces = told(first, SamplingParams(max_tokens=NUM, **letters), [])
    before = "".join(piece.text for piece in pieces[:15])
    text = "".join(piece.text for piece in pieces)
    stop = text[len(before) - 1 : len(before) + 3]
    assert text.find(stop) == len(before) - 1
    params = SamplingParams(max_tokens=NUM, stop=[stop], **letters)
    (whole,) = first.generate(PROMPT, params)
    cut = sum(len(piece.token_ids) for piece in pieces[:15])
    ids, rest, _, reason = joined(told(second, params, whole.token_ids[:cut]))
    assert whole.token_ids[cut:] == ids and reason == "stop" == whole.finish_reason
    assert (whole.text, rest) == (before[:-1], "")


@pytest.mark.parametrize(
    ("output_ids", "code"),
    [
        ([5] * NUM, "too_long"),
        ([5, 3], "conflict"),
        ([5, 10**6], "out_of_range"),
        ([5, 10**30], "out_of_range"),
        ([5, 6.5], "wrong_type"),  # it was taken for 6
        ([True], "wrong_type"),
        ("ab", "wrong_type"),
        (np.array([5, 6]), "wrong_type"),
        (5, "wrong_type"),
    ],
)
def test_an_output_that_cannot_go_on_is_refused(
    engines: tuple[LLM, LLM], output_ids: object, code: str
) -> None:
    params = SamplingParams(max_tokens=NUM, stop_token_ids=[3])
    assert code_and_field(lambda: told(engines[1], params, output_ids)) == (code, "output_ids")


def test_an_output_that_its_grammar_does_not_lead_to_is_refused(engines: tuple[LLM, LLM]) -> None:
    params = SamplingParams(max_tokens=NUM, structured_outputs={"regex": "[a-f]{30}"})
    (whole,) = engines[0].generate(PROMPT, params)
    other = [*whole.token_ids[:2], PROMPT[0]]
    assert code_and_field(lambda: told(engines[1], params, other)) == ("conflict", "structured_outputs")


def test_each_engine_may_go_on_again(engines: tuple[LLM, LLM]) -> None:
    """Cut twice, and with what was computed for the first part already there."""
    first, second = engines
    params = SamplingParams(max_tokens=NUM, temperature=1.0, seed=9, presence_penalty=1.0)
    (whole,) = first.generate(PROMPT, params)
    for llm, cut in [(second, 10), (first, 25), (second, 33)]:
        assert joined(told(llm, params, whole.token_ids[:cut]))[0] == whole.token_ids[cut:]
