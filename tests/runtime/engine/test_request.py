"""What a request may be, and when it ends."""

import pytest

from hemiola.runtime.api import Logprob, SamplingParams
from hemiola.runtime.engine.request import Bounds, Request, new_request
from hemiola.runtime.errors import Refused

BOUNDS = Bounds(max_len=20, built_max_len=20, vocab_size=50, eos_ids=(7, 8))


def request(prompt: list[int], **params: object) -> Request:
    return new_request(1, prompt, SamplingParams(**params), BOUNDS)


def test_three_lengths() -> None:
    made = request([1, 2, 3], max_tokens=4)
    assert (made.prompt_len, made.committed_len, made.total_len, len(made.ids)) == (3, 0, 3, 7)
    assert len(request([1] * 18, max_tokens=9).ids) == 20


def test_the_first_rule_to_apply_ends_it() -> None:
    made = request([1], max_tokens=3)
    made.append([2, 7, 4])
    assert made.finish_reason == "stop" and made.ids[: made.total_len].tolist() == [1, 2, 7]
    made = request([1], max_tokens=3, ignore_eos=True, stop_token_ids=[9])
    made.append([7, 8])
    assert made.finish_reason is None
    made.append([9])
    assert made.finish_reason == "stop", "the stop id counts, even on the last place"
    made = request([1], max_tokens=2)
    made.append([2, 3, 4])
    assert made.finish_reason == "length" and made.total_len == 3


def test_logprobs_are_cut_with_the_tokens() -> None:
    made = request([1], max_tokens=5)
    made.append([2, 7, 4])
    made.add_logprobs([Logprob(i, -1.0, ()) for i in (2, 7, 4)])
    assert [entry.token_id for entry in made.logprobs] == [2, 7]
    made.stop_at(2)
    assert [entry.token_id for entry in made.logprobs] == [2] and made.finish_reason == "stop"


def test_seeds() -> None:
    assert request([1], seed=3).seed == 3
    assert request([1]).seed != request([1]).seed


BAD_PROMPTS = [
    ([], "prompt is empty; give at least one token"),
    ([1] * 20, "prompt is 20 tokens, max_len=20 must hold it and at least one more"),
    ([1] * 20, "one more; shorten it or rebuild with --max-len 21, if the checkpoint's max_position"),
    ([1, 50], "token id 50 at position 1 of the prompt is not in the vocabulary 0..49"),
    ([1, 2, -1], "token id -1 at position 2"),
    ([1, 2**70], f"token id {2**70} at position 1 of the prompt is not in the vocabulary"),
    ([-5, 2**63 + 1], "token id -5 at position 0"),
    ([1, "a"], "prompt is a list of int, str; pass text or a list of token ids (int)"),
    ([1.5], "prompt is a list of float"),
    ([None], "prompt is a list of NoneType"),
    ([True], "prompt is a list of bool"),
    ([[1], [2]], "prompt is a list of list"),
    ([[1], [2, 3]], "prompt is a list of list"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "reason"), BAD_PROMPTS)
def test_bad_prompts_are_refused(prompt: list, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        request(prompt)
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_a_prompt_too_long_for_the_options_may_fit_the_engine() -> None:
    bounds = BOUNDS._replace(max_len=10)
    with pytest.raises(Refused, match="shorten it or start with max_len=16"):
        new_request(1, [1] * 15, SamplingParams(), bounds)


BAD_PARAMS = [
    ({"max_tokens": 0}, "max_tokens is 0: it should be greater than or equal to 1"),
    ({"max_tokens": "5"}, "max_tokens is '5': "),
    ({"max_tokens": None}, "max_tokens is None: "),
    ({"temperature": -0.1}, "temperature is -0.1: "),
    ({"temperature": float("nan")}, "temperature is nan: "),
    ({"temperature": float("inf")}, "temperature is inf: "),
    ({"top_p": 0.0}, "top_p is 0.0: "),
    ({"top_p": 1.1}, "top_p is 1.1: it should be less than or equal to 1"),
    ({"top_k": -2}, "top_k is -2: "),
    ({"min_p": 2}, "min_p is 2: "),
    ({"seed": -(2**63) - 1}, f"seed is {-(2**63) - 1}: "),
    ({"seed": 2**64}, f"seed is {2**64}: "),
    ({"stop": [""]}, "stop is ['']: an empty stop string"),
    ({"stop": [3]}, "stop is 3: "),
    ({"stop": 3}, "stop is 3: "),
    ({"stop_token_ids": ["a"]}, "stop_token_ids is 'a': "),
    ({"logprobs": 21}, "logprobs is 21: it should be less than or equal to 20"),
    ({"ignore_eos": 1}, "ignore_eos is 1: "),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: it should be greater than 0"),
    ({"repetition_penalty": "1"}, "repetition_penalty is '1': "),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1: it should be less than or equal to 2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1: "),
    ({"logit_bias": {1: float("inf")}}, "logit_bias is inf: it should be a finite number"),
    ({"logit_bias": {1: float("nan")}}, "logit_bias is nan: it should be a finite number"),
    ({"logit_bias": {"1": 1.0}}, "logit_bias is '1': "),
    ({"logit_bias": [1, 2]}, "logit_bias is [1, 2]: "),
    ({"bad_words": ["a", ""]}, "bad_words is ['a', '']: an empty bad word"),
    ({"bad_words": [[1]]}, "bad_words is (1,): "),
    ({"bad_words_ids": [[]]}, "bad_words_ids is [[]]: an empty bad word"),
    ({"bad_words_ids": [1]}, "bad_words_ids is 1: "),
    ({"min_tokens": -1}, "min_tokens is -1: "),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5: max_tokens is 4; raise it or lower min_tokens"),
    ({"min_tokens": 17}, "min_tokens is 17: max_tokens is 16;"),
    ({"min_tokens": 5, "max_tokens": "x"}, "max_tokens is 'x': "),
    ({"num_drafts": -1}, "num_drafts is -1: "),
    ({"num_drafts": True}, "num_drafts is True: "),
    ({"priority": 0.5}, "priority is 0.5: "),
    ({"cache_salt": 3}, "cache_salt is 3: "),
    ({"cache_salt": "a\ud800"}, r"cache_salt is 'a\ud800': not valid Unicode (a lone surrogate); remove it"),
    ({"bad_words": ["b", "a\ud800"]}, r"bad_words is ['b', 'a\ud800']: not valid Unicode"),
    ({"stop": "a\ud800"}, r"stop is 'a\ud800': not valid Unicode"),
    ({"max_token": 4}, "unknown option 'max_token'; the options are max_tokens, temperature,"),
]


@pytest.mark.parametrize(("params", "reason"), BAD_PARAMS)
def test_bad_sampling_params_are_refused(params: dict, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        SamplingParams(**params)
    assert str(refused.value).startswith(reason) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"stop_token_ids": [50]}, "stop_token_ids holds 50, the vocabulary is 0..49; remove it"),
        ({"logit_bias": {50: 1.0}}, "logit_bias holds 50, the vocabulary is 0..49; remove it"),
        ({"bad_words_ids": [[1, -1]]}, "bad_words_ids holds -1, the vocabulary is 0..49; remove it"),
        ({"bad_words": "x"}, "bad_words is text, the engine has no tokenizer; pass bad_words_ids"),
    ],
)
def test_what_does_not_fit_the_engine_is_refused(params: dict, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        request([1], **params)
    assert str(refused.value) == reason


def test_the_rule_is_what_chooses_the_tokens() -> None:
    made = request([1, 2], seed=2**64 - 1, stop_token_ids=[9], bad_words_ids=[[3, 4], [3, 4]])
    rule = made.rule
    assert (rule.seed, rule.prompt_len, rule.stop_ids, rule.bad_words) == (
        2**64 - 1, 2, {7, 8, 9}, ((3, 4),)
    )  # fmt: skip
    assert rule.params is made.params and rule.greedy and rule.edits_logits


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {3: 1}},
        {"bad_words_ids": [[3]]},
        {"min_tokens": 2},
    ],
)
def test_what_changes_logits_is_an_edit(params: dict) -> None:
    assert request([1], **params).rule.edits_logits
    assert not request([1], temperature=0.5, top_k=3, stop="x", logprobs=1).rule.edits_logits
    assert not request([1], min_tokens=2, ignore_eos=True).rule.edits_logits


def test_a_bad_word_is_spelt_at_the_beginning_and_after_a_space() -> None:
    spelt: list[str] = []

    def encode(text: str) -> list[int]:
        spelt.append(text)
        return [] if text == "nothing" else [len(text), 1] if text.startswith(" ") else [len(text)]

    params = SamplingParams(bad_words=[" ab", "ab", " "], bad_words_ids=[[2]])
    assert new_request(1, [1], params, BOUNDS, encode).bad_words == ((2,), (3, 1), (1, 1))
    assert spelt == ["ab", " ab", "ab", " ab", " "]
    with pytest.raises(Refused, match="bad_words holds 'nothing', which has no tokens"):
        new_request(1, [1], SamplingParams(bad_words="nothing"), BOUNDS, encode)


def test_lists_and_single_strings_become_tuples() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[1, 2])
    assert params.stop == ("x",) and params.stop_token_ids == (1, 2)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
