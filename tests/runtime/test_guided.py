"""Structured outputs as their users see them: options. docs/guided.md is run by tests/test_docs.py."""

import pytest
from kit.refused import code_and_field, refused

from hemiola.runtime.api import SamplingParams, StructuredOutputsParams

ONE = "give exactly one of json, json_object, regex, grammar, choice"


@pytest.mark.parametrize(
    ("asked", "code", "field"),
    [
        ({}, "missing", ""),
        ({"json_object": False}, "missing", ""),
        ({"regex": "a", "choice": ["a"]}, "conflict", ""),
        ({"json": {}, "json_object": True}, "conflict", ""),
        ({"regexp": "a"}, "unknown", "regexp"),
        ({"json": "{"}, "malformed", "json"),
        ({"json": "5"}, "wrong_type", "json"),
        ({"json": [1]}, "wrong_type", "json"),
        ({"json": {"const": float("nan")}}, "malformed", "json"),
        ({"json": {"const": b"a"}}, "malformed", "json"),
        ({"json": '{"not":' * 9999}, "malformed", "json"),
        ({"json_object": "yes"}, "wrong_type", "json_object"),
        ({"regex": 5}, "wrong_type", "regex"),
        ({"regex": "\ud800"}, "malformed", "regex"),
        ({"grammar": ["a"]}, "wrong_type", "grammar"),
        ({"choice": []}, "out_of_range", "choice"),
        ({"choice": "ab"}, "wrong_type", "choice"),
        ({"choice": ["a", 1]}, "wrong_type", "choice[1]"),
        ({"choice": ["\udfff"]}, "malformed", "choice"),
    ],
)
def test_what_says_too_little_or_too_much_is_refused(asked: dict, code: str, field: str) -> None:
    assert code_and_field(lambda: StructuredOutputsParams(**asked)) == (code, field)
    within = refused(lambda: SamplingParams(structured_outputs=asked))
    assert (within.code, within.field) == (code, f"structured_outputs.{field}".rstrip("."))
    assert str(within).startswith("structured_outputs") and len(str(within)) < 300


def test_what_is_refused_within_structured_outputs_reads_as_one_line() -> None:
    within = refused(lambda: SamplingParams(structured_outputs={"regex": 5}))
    assert str(within) == "structured_outputs.regex is 5; give a text"
    within = refused(lambda: SamplingParams(structured_outputs={"regex": "a", "choice": ["a"]}))
    assert str(within) == f"structured_outputs: regex and choice given; {ONE}"


def test_a_schema_is_the_same_as_its_text() -> None:
    made = [StructuredOutputsParams(json=schema) for schema in ({"type": "null"}, '{"type":"null"}')]
    assert made[0] == made[1] and hash(made[0]) == hash(made[1])
    assert SamplingParams(structured_outputs={"json": {"type": "null"}}).structured_outputs == made[0]
