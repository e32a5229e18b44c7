"""What a bad body may cost: pydantic's errors are counted, for every list of every request."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Refused
from hemiola.runtime.serving.openai.responses import ResponsesRequest
from hemiola.runtime.serving.openai.schema import ChatRequest, CompletionRequest

BAD = [None] * 1000  # fits no item
MOST_ERRORS = 40  # of one object: its fields, each of a union's types


def floods(kind: Any, place: str) -> Iterator[tuple[str, object]]:
    """A value with a long bad list for every list within a type, and where that list is."""
    arguments = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            for at, value in floods(field.annotation, f"{place}.{name}"):
                yield at, {field.alias or name: value}
    elif get_origin(kind) in (list, tuple):
        yield f"{place}[]", BAD
        for at, value in floods(arguments[0], f"{place}[]"):
            yield at, [value]
    elif get_origin(kind) is Annotated:
        yield from floods(arguments[0], place)
    else:  # a union's types; of others there are none
        for one in arguments:
            yield from floods(one, place)


KINDS = (ChatRequest, CompletionRequest, ResponsesRequest)
FLOODS = {at: (kind, value) for kind in KINDS for at, value in floods(kind, kind.__name__)}


def test_every_list_is_flooded() -> None:
    assert set(FLOODS) == {
        "ChatRequest.messages[]",
        "ChatRequest.messages[].annotations[]",
        "ChatRequest.messages[].content[]",
        "ChatRequest.messages[].reasoning_details[]",
        "ChatRequest.messages[].thinking_blocks[]",
        "ChatRequest.messages[].tool_calls[]",
        "ChatRequest.modalities[]",
        "ChatRequest.tools[]",
        "CompletionRequest.prompt[]",
        "CompletionRequest.prompt[][]",
        "ResponsesRequest.include[]",
        "ResponsesRequest.input[]",
        "ResponsesRequest.input[].content[]",
        "ResponsesRequest.input[].content[].annotations[]",
        "ResponsesRequest.input[].content[].logprobs[]",
        "ResponsesRequest.input[].output[]",
        "ResponsesRequest.input[].output[].annotations[]",
        "ResponsesRequest.input[].output[].logprobs[]",
        "ResponsesRequest.input[].summary[]",
        "ResponsesRequest.tools[]",
    }


@pytest.mark.parametrize("at", FLOODS)
def test_a_list_of_bad_items_builds_no_error_for_each(at: str) -> None:
    kind, body = FLOODS[at]
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(body))
    assert caught.value.error_count() < MOST_ERRORS


@pytest.mark.parametrize(
    ("asked", "most"),
    [({"bad_words_ids": [BAD] * 9}, len(BAD)), ({"structured_outputs": {"choice": BAD}}, 1)],
    ids=["bad_words_ids", "choice"],
)
def test_nor_do_bad_items_of_our_own_parameters(asked: dict[str, object], most: int) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams.__pydantic_validator__.validate_python(asked)
    assert caught.value.error_count() <= most


def test_entries_of_entries_have_a_limit_too() -> None:
    with pytest.raises(Refused, match="bad_words_ids has 1025 entries, at most 1024 are served"):
        SamplingParams(bad_words_ids=((1,), (1,) * 1025))
