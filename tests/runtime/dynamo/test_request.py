"""Requests of Dynamo's frontend. What it sends was written down from ai-dynamo 1.6.1's own."""

import copy
from typing import Any

import pytest

from hemiola.runtime.api import SamplingParams, StructuredOutputsParams
from hemiola.runtime.dynamo.request import link_of, read_request
from hemiola.runtime.errors import Refused

MAX_LEN = 100
LEAST = -5  # priority
SENT: dict[str, Any] = {  # all fields, as the frontend sends them for {"prompt": [5, 6, 7], "max_tokens": 30}
    "model": "hemiola",
    "token_ids": [5, 6, 7],
    "stop_conditions": {
        "max_tokens": 30,
        "stop": None,
        "stop_token_ids": None,
        "stop_token_ids_visible": None,
        "stop_token_ids_hidden": [0, 2],
        "min_tokens": None,
        "ignore_eos": None,
        "max_thinking_tokens": None,
    },
    "sampling_options": {
        "n": None,
        "best_of": None,
        "presence_penalty": None,
        "frequency_penalty": None,
        "repetition_penalty": None,
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "min_p": None,
        "use_beam_search": None,
        "length_penalty": None,
        "seed": None,
        "include_stop_str_in_output": None,
        "guided_decoding": None,
    },
    "output_options": {
        "logprobs": None,
        "prompt_logprobs": None,
        "skip_special_tokens": None,
        "formatted_prompt": None,
        "return_tokens_as_token_ids": None,
    },
    "eos_token_ids": [0, 2],
    "mdc_sum": "ce41dd1f",
    "annotations": [],
    "routing": {"dp_rank": 0},
    "router_config_override": None,
}


def sent(**changes: Any) -> dict[str, Any]:
    """The request with these fields, wherever they stand in it."""
    made = copy.deepcopy(SENT)
    for name, value in changes.items():
        part = next((p for p in made.values() if isinstance(p, dict) and name in p), made)
        part[name] = value
    return made


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, {}),
        ({"max_tokens": None}, {"max_tokens": MAX_LEN - 3}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"repetition_penalty": 1.100000023841858, "temperature": 0.699999988079071},
         {"repetition_penalty": 1.1, "temperature": 0.7}),
        ({"top_p": 0.8999999761581421, "min_p": 0.05000000074505806, "top_k": -1},
         {"top_p": 0.9, "min_p": 0.05, "top_k": 0}),
        ({"top_k": 5, "seed": -7, "presence_penalty": -0.5, "frequency_penalty": 0.25},
         {"top_k": 5, "seed": -7, "presence_penalty": -0.5, "frequency_penalty": 0.25}),
        ({"stop": ["a", "b"], "stop_token_ids": [9], "stop_token_ids_visible": [8, 9], "min_tokens": 4},
         {"stop": ["a", "b"], "stop_token_ids": [9, 8], "min_tokens": 4}),
        ({"ignore_eos": True, "stop_token_ids_hidden": None}, {"ignore_eos": True}),
        ({"logprobs": 0, "prompt_logprobs": 2}, {"logprobs": 0, "prompt_logprobs": 2}),
        ({"routing": {"dp_rank": 0, "cache_salt": "t", "priority": 5}}, {"cache_salt": "t", "priority": -5}),
        ({"guided_decoding": {"json": {"type": "object"}}},
         {"structured_outputs": StructuredOutputsParams(json={"type": "object"})}),
        ({"guided_decoding": {"choice": ["a", "b"], "backend": None}},
         {"structured_outputs": StructuredOutputsParams(choice=["a", "b"])}),
        ({"annotations": ["x", 'structured_outputs:{"regex": "a+"}']},
         {"structured_outputs": StructuredOutputsParams(regex="a+")}),
        ({"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0}, {}),
    ],
)  # fmt: skip
def test_a_request_is_read(changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = read_request(sent(**changes), MAX_LEN, LEAST)
    assert found.params == SamplingParams(**{"max_tokens": 30, "temperature": 1.0, **wanted})
    assert (found.prompt, found.output_ids) == ([5, 6, 7], [])


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, {"max_tokens": 32}),
        ({"min_tokens": 4}, {"max_tokens": 32, "min_tokens": 6}),
        ({"min_tokens": 0}, {"max_tokens": 32, "min_tokens": 2}),
        ({"max_tokens": None}, {"max_tokens": MAX_LEN - 3}),
        ({"presence_penalty": 1.0}, {"max_tokens": 32, "presence_penalty": 1.0}),
    ],
)
def test_a_request_that_was_cut_has_its_first_lengths(
    changes: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """The frontend has lowered max_tokens and min_tokens by the 2 tokens that stand behind the prompt."""
    cut = sent(token_ids=[5, 6, 7, 8, 9], migration_link=link_of(3), **changes)
    found = read_request(cut, MAX_LEN, LEAST)
    assert (found.prompt, found.output_ids) == ([5, 6, 7], [8, 9])
    assert found.params == SamplingParams(**{"temperature": 1.0, **wanted})


TRACED = {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "span_id": "00f067aa0ba902b7"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n": 2}, "n is 2, which is not served; leave it out"),
        ({"routing": {"priority": 6}}, "priority is 6, this worker takes 5 or less"),
        ({"use_beam_search": True}, "use_beam_search is True, which is not served; leave it out"),
        ({"max_thinking_tokens": 9}, "max_thinking_tokens is 9, which is not served"),
        ({"guided_decoding": {"regex": "a", "backend": "xgrammar"}}, "backend is 'xgrammar', which is not"),
        ({"multi_modal_data": {"image_url": []}}, "multi_modal_data is {'image_url': []}, which is not"),
        ({"annotations": ["structured_outputs:[1]"]}, "which is no JSON object; write"),
        ({"annotations": ['structured_outputs:{"regexp": "a"}']}, "regexp"),
        ({"guided_decoding": {"regex": "a", "choice": ["b"]}}, "regex and choice given"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"migration_link": link_of(4)}, "migration_link is 4, but the request has 3 tokens"),
        ({"migration_link": TRACED, "presence_penalty": 1.0}, "presence_penalty cannot go on here: Dynamo's"),
        ({"migration_link": TRACED, "annotations": ['structured_outputs:{"regex": "a"}']}, "cannot go on"),
    ],
)
def test_what_would_be_dropped_or_wrong_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused) as caught:
        read_request(sent(**changes), MAX_LEN, LEAST)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"annotations": [f"structured_outputs:{' ' * 2**20}[]"]}, "annotations has 1048578 characters, the"),
        ({"annotations": [f"structured_outputs:{'[],' * 2**17}"]}, "annotations holds 131072 objects, lists"),
        ({"guided_decoding": {"json": {"enum": [[]] * (2**18 + 1)}}}, "structured_outputs is too large"),
    ],
)
def test_a_grammar_far_too_large_is_read_while_all_streams_wait(changes: dict[str, Any], words: str) -> None:
    """One of 30 MB held up every stream of its worker for 5 s."""
    with pytest.raises(Refused, match=words):
        read_request(sent(**changes), MAX_LEN, LEAST)


def test_a_traced_request_that_needs_no_length_goes_on() -> None:
    """Its tokens are a prompt: greedy and seeded choices depend on no more than all tokens before."""
    found = read_request(sent(migration_link=TRACED, min_tokens=4), MAX_LEN, LEAST)
    assert (found.prompt, found.output_ids, found.params.min_tokens) == ([5, 6, 7], [], 4)
