"""Structured outputs as their users see them: options, and the page that explains them."""

import io
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from hemiola.runtime.api import SamplingParams, StructuredOutputsParams
from hemiola.runtime.cli.main import main
from hemiola.runtime.errors import Refused

MANUAL = (Path(__file__).parents[2] / "docs/guided.md").read_text()
CODE, COMMANDS = re.findall(r"^```[a-z]*\n(.*?)^```", MANUAL, re.MULTILINE | re.DOTALL)
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


@pytest.fixture
def engines(bundled: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines/qwen").symlink_to(bundled("qwen3.5-code"))
    monkeypatch.chdir(tmp_path)


def test_the_manuals_example_runs_and_says_what_was_asked_for(engines: None) -> None:
    said = io.StringIO()
    with redirect_stdout(said):
        exec(compile(CODE, "docs/guided.md", "exec"), {})
    reasons, texts = zip(*(line.split(" ", 1) for line in said.getvalue().splitlines()), strict=True)
    patterns = [r"\{.*\}", r"\{.*", "[a-z]{3,9}_[0-9]{2}", "yes|no|perhaps", r"[0-9(][0-9(+)]*"]
    assert set(reasons) <= {"stop", "length"} and len(texts) == len(patterns)
    for reason, text, pattern in zip(reasons, texts, patterns, strict=True):
        assert re.fullmatch(pattern, text) or reason == "length", text


def test_the_manuals_command_runs(
    engines: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (command,) = [shlex.split(line) for line in COMMANDS.splitlines() if line.startswith("hemiola generate")]
    monkeypatch.setattr(sys, "argv", command)
    main()
    assert re.fullmatch("[0-9]{3}\n", capfd.readouterr().out)
