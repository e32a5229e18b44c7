"""What a request may be, and when it ends."""

import pytest
from kit.refused import code_and_field, refused

from hemiola.runtime.api import Logprob, SamplingParams
from hemiola.runtime.errors import Name, Refused
from hemiola.runtime.schedule.request import Bounds, Request, new_request

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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bad_words_ids": [[i] for i in range(50)]}, "forbid all 50 tokens; leave one"),
        ({"bad_words_ids": [[3, i] for i in range(50)]}, r"forbid all 50 tokens behind \[3\]; leave one"),
        (
            {
                "bad_words_ids": [*([5, 3, i] for i in range(20)), *([3, i] for i in range(20, 49))],
                "stop_token_ids": [49],
                "min_tokens": 1,
            },
            r"forbid all 50 tokens behind \[5, 3\]; leave one",
        ),
    ],
)
def test_bad_words_behind_which_nothing_may_come_are_answered_with_a_forbidden_token(
    options: dict, said: str
) -> None:
    with pytest.raises(Refused, match=said):
        request([1], **options)
    one_less = options | {"bad_words_ids": options["bad_words_ids"][:-1]}
    assert request([1], **one_less).bad_words


BAD_PROMPTS = [
    ([], "out_of_range", "prompt"),
    ([1] * 20, "too_long", "prompt"),
    ([1, 50], "out_of_range", "prompt"),
    ([1, 2, -1], "out_of_range", "prompt"),
    ([1, 2**70], "out_of_range", "prompt"),
    ([-5, 2**63 + 1], "out_of_range", "prompt"),
    ([1, "a"], "wrong_type", "prompt"),
    ([1.5], "wrong_type", "prompt"),
    ([None], "wrong_type", "prompt"),
    ([True], "wrong_type", "prompt"),
    ([[1], [2]], "wrong_type", "prompt"),
    ([[1], [2, 3]], "wrong_type", "prompt"),
]


@pytest.mark.parametrize(("prompt", "code", "field"), BAD_PROMPTS)
def test_bad_prompts_are_refused(prompt: list, code: str, field: str) -> None:
    assert code_and_field(lambda: request(prompt)) == (code, field)


def test_a_long_prompt_is_refused_with_its_length_the_limit_and_the_way_out() -> None:
    assert str(refused(lambda: request([1] * 20))) == (
        "prompt is 20 tokens, max_len=20 must hold it and at least one more; shorten it or rebuild with"
        " --max-len 21, if the checkpoint's max_position_embeddings allow so many"
    )


def test_a_prompt_too_long_for_the_options_may_fit_the_engine() -> None:
    bounds = BOUNDS._replace(max_len=10)
    error = refused(lambda: new_request(1, [1] * 15, SamplingParams(), bounds))
    assert error.way_out == ("shorten it or start with ", Name("max_len", 16))
    assert str(error).endswith("shorten it or start with max_len=16")


BAD_PARAMS = [
    ({"max_tokens": 0}, "out_of_range", "max_tokens"),
    ({"max_tokens": "5"}, "wrong_type", "max_tokens"),
    ({"max_tokens": None}, "wrong_type", "max_tokens"),
    ({"temperature": -0.1}, "out_of_range", "temperature"),
    ({"temperature": float("nan")}, "out_of_range", "temperature"),
    ({"temperature": float("inf")}, "out_of_range", "temperature"),
    ({"top_p": 0.0}, "out_of_range", "top_p"),
    ({"top_p": 1.1}, "out_of_range", "top_p"),
    ({"top_k": -2}, "out_of_range", "top_k"),
    ({"min_p": 2}, "out_of_range", "min_p"),
    ({"seed": -(2**63) - 1}, "out_of_range", "seed"),
    ({"seed": 2**64}, "out_of_range", "seed"),
    ({"stop": [""]}, "out_of_range", "stop"),
    ({"stop": [3]}, "wrong_type", "stop[0]"),
    ({"stop": 3}, "wrong_type", "stop"),
    ({"stop_token_ids": ["a"]}, "wrong_type", "stop_token_ids[0]"),
    ({"logprobs": 21}, "out_of_range", "logprobs"),
    ({"ignore_eos": 1}, "wrong_type", "ignore_eos"),
    ({"repetition_penalty": 0.0}, "out_of_range", "repetition_penalty"),
    ({"repetition_penalty": "1"}, "wrong_type", "repetition_penalty"),
    ({"presence_penalty": 2.1}, "out_of_range", "presence_penalty"),
    ({"frequency_penalty": -2.1}, "out_of_range", "frequency_penalty"),
    ({"logit_bias": {1: float("inf")}}, "out_of_range", "logit_bias[1]"),
    ({"logit_bias": {1: float("nan")}}, "out_of_range", "logit_bias[1]"),
    ({"logit_bias": {"1": 1.0}}, "wrong_type", "logit_bias.1"),
    ({"logit_bias": [1, 2]}, "wrong_type", "logit_bias"),
    ({"bad_words": ["a", ""]}, "out_of_range", "bad_words"),
    ({"bad_words": [[1]]}, "wrong_type", "bad_words[0]"),
    ({"bad_words_ids": [[]]}, "out_of_range", "bad_words_ids"),
    ({"bad_words_ids": [1]}, "wrong_type", "bad_words_ids[0]"),
    ({"min_tokens": -1}, "out_of_range", "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "conflict", "min_tokens"),
    ({"min_tokens": 17}, "conflict", "min_tokens"),
    ({"min_tokens": 5, "max_tokens": "x"}, "wrong_type", "max_tokens"),
    ({"num_drafts": -1}, "out_of_range", "num_drafts"),
    ({"num_drafts": True}, "wrong_type", "num_drafts"),
    ({"priority": 0.5}, "wrong_type", "priority"),
    ({"cache_salt": 3}, "wrong_type", "cache_salt"),
    ({"cache_salt": "a\ud800"}, "malformed", "cache_salt"),
    ({"bad_words": ["b", "a\ud800"]}, "malformed", "bad_words"),
    ({"stop": "a\ud800"}, "malformed", "stop"),
    ({"max_token": 4}, "unknown", "max_token"),
]


@pytest.mark.parametrize(("params", "code", "field"), BAD_PARAMS)
def test_bad_sampling_params_are_refused(params: dict, code: str, field: str) -> None:
    error = refused(lambda: SamplingParams(**params))
    assert (error.code, error.field) == (code, field)
    if code != "unknown":
        assert str(error).startswith(f"{field} is ") and error.way_out


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
    error = refused(lambda: request([1], **params))
    assert (str(error), error.field) == (reason, next(iter(params)))


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
    error = refused(lambda: new_request(1, [1], SamplingParams(bad_words="nothing"), BOUNDS, encode))
    assert str(error) == "bad_words holds 'nothing', which has no tokens in this tokenizer; remove it"


def test_lists_and_single_strings_become_tuples() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[1, 2])
    assert params.stop == ("x",) and params.stop_token_ids == (1, 2)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
