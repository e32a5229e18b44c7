"""Structured outputs as their users see them: options. docs/guided.md is run by tests/test_docs.py."""

import pytest

from hemiola.runtime.api import SamplingParams, StructuredOutputsParams
from hemiola.runtime.errors import Refused

ONE = "give exactly one of json, json_object, regex, grammar, choice"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, f"nothing given; {ONE}"),
        ({"json_object": False}, f"nothing given; {ONE}"),
        ({"regex": "a", "choice": ["a"]}, f"regex and choice given; {ONE}"),
        ({"json": {}, "json_object": True}, f"json and json_object given; {ONE}"),
        (
            {"regexp": "a"},
            "unknown option 'regexp'; the options are json, json_object, regex, grammar, choice",
        ),
        ({"json": "{"}, "json is '{': not JSON (Expecting property name"),
        ({"json": "5"}, 'json is \'5\': a schema is an object, such as {"type": "integer"}'),
        ({"json": [1]}, "json is [1]: a schema is an object"),
        ({"json": {"const": float("nan")}}, "not JSON (Out of range float values"),
        ({"json": {"const": b"a"}}, "not JSON (Object of type bytes is not JSON serializable)"),
        ({"json": '{"not":' * 9999}, 'json is \'{"not":'),
        ({"json_object": "yes"}, "json_object is 'yes': it should be a valid boolean"),
        ({"regex": 5}, "regex is 5: it should be a valid string"),
        ({"regex": "\ud800"}, "not valid Unicode (a lone surrogate)"),
        ({"grammar": ["a"]}, "grammar is ['a']: it should be a valid string"),
        ({"choice": []}, "choice is []: nothing to choose from; give at least one text"),
        ({"choice": "ab"}, "choice is 'ab': it should be a valid tuple"),
        ({"choice": ["a", 1]}, "choice is 1: it should be a valid string"),
        ({"choice": ["\udfff"]}, "not valid Unicode (a lone surrogate)"),
    ],
)
def test_what_says_too_little_or_too_much_is_refused(asked: dict, reason: str) -> None:
    for made in (lambda: StructuredOutputsParams(**asked), lambda: SamplingParams(structured_outputs=asked)):
        with pytest.raises(Refused) as caught:
            made()
        assert reason in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("structured_outputs: ") and len(str(caught.value)) < 300


def test_a_schema_is_the_same_as_its_text() -> None:
    made = [StructuredOutputsParams(json=schema) for schema in ({"type": "null"}, '{"type":"null"}')]
    assert made[0] == made[1] and hash(made[0]) == hash(made[1])
    assert SamplingParams(structured_outputs={"json": {"type": "null"}}).structured_outputs == made[0]
