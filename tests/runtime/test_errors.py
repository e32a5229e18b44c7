"""Errors as data: the sentence that a door makes of them, and what they keep on their way."""

import copy
import pickle

import pytest

from hemiola.runtime.errors import (
    ABSENT,
    Amount,
    Busy,
    Cancelled,
    Failed,
    Lost,
    Name,
    Refused,
    one_line,
    shown,
    within,
)
from hemiola.runtime.serving.error_text import error_from, kind_of, text_of

ROWS = Refused(
    "conflict",
    "max_rows",
    9,
    (Name("max_step_tokens"), " is 4: each row needs a token"),
    ("lower ", Name("max_rows"), " or start with ", Name("max_step_tokens", 9)),
)


def flags(name: Name) -> str:
    flag = f"--{name.field.replace('_', '-')}"
    return flag if name.value is ABSENT else f"{flag} {name.value}"


def test_what_somebody_else_said_goes_to_the_terminal_as_it_is() -> None:
    assert one_line("a\n b\x1b]0;c\x07 \ud800") == "a b\ufffd]0;c\ufffd \ufffd"


SENTENCES = [
    (Refused("out_of_range", "top_p", 1.5, way_out="give at most 1"), "top_p is 1.5; give at most 1"),
    (Refused("wrong_type", "prompt", bytes, way_out="pass text"), "prompt is bytes; pass text"),
    (Refused("too_long", "stop", Amount(9, "texts"), "at most 4"), "stop has 9 texts, at most 4"),
    (Refused("out_of_range", "choice", (), "at least one"), "choice is [], at least one"),
    (Refused("wrong_type", "seed", None), "seed is None"),
    (Refused("damaged", message="a/b was changed", way_out="build again"), "a/b was changed; build again"),
    (ROWS, "max_rows is 9, max_step_tokens is 4: each row needs a token; lower max_rows or start with"
           " max_step_tokens=9"),
    (Refused("other", message="of another version; build again"), "of another version; build again"),
    (ROWS.at("file.json"), f"file.json: {ROWS}"),
    (ROWS.at("b").at("a"), f"a: b: {ROWS}"),
    (Refused("wrong_type", "regex", 5).under("rules"), "rules.regex is 5"),
    (Refused("wrong_type", "[0]", 5).under("stop"), "stop[0] is 5"),
    (Refused("missing", message="nothing given").under("rules"), "rules: nothing given"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "sentence"), SENTENCES)
def test_an_error_is_one_sentence(error: Refused, sentence: str) -> None:
    assert str(error) == sentence


def test_a_value_of_any_length_keeps_the_sentence_short() -> None:
    for value in ("x" * 10**6, 10**5000, [["x"] * 9] * 999):
        assert len(str(Refused("out_of_range", "stop", value, way_out="shorten it"))) < 150


class Written:
    """Counts how often it is written."""

    num = 0

    def __repr__(self) -> str:
        Written.num += 1
        return "w"


def test_all_of_a_long_list_is_written_for_the_little_that_is_shown() -> None:
    """A million numbers held all threads up for a second."""
    for value in ([Written()] * 10**4, [[Written()] * 10**4], {1: [Written()] * 10**4}):
        Written.num = 0
        said = shown(value)
        assert len(said) < 100 and said.endswith("entries)" if len(value) > 1 else "entry)")
        assert Written.num < 100


def test_a_value_that_is_nested_too_deeply_leaves_its_caller_without_an_error() -> None:
    value: object = []
    for _ in range(10**5):
        value = [value]
    assert shown(value) == f"{'[' * 60}... (1 entry)"


@pytest.mark.parametrize("value", [[], (), {}, (1,), (1, 2), [[1], {"a": (2,), 3: None}], {"a": [b"x"]}, "y"])
def test_a_short_value_is_not_shown_as_python_writes_it(value: object) -> None:
    assert shown(value) == repr(value)


def test_a_door_writes_its_own_names_and_the_code_stays() -> None:
    renamed = ROWS.at("--compare a=1").renamed(flags)
    assert str(renamed) == (
        "--compare a=1: --max-rows is 9, --max-step-tokens is 4: each row needs a token;"
        " lower --max-rows or start with --max-step-tokens 9"
    )
    assert (renamed.code, renamed.field, renamed.value) == ("conflict", "--max-rows", 9)


def test_a_field_within_a_field_has_a_path() -> None:
    error = Refused("wrong_type", "regex", 5).under("structured_outputs").at("prompts[3]")
    assert (error.field, str(error)) == (
        "structured_outputs.regex",
        "prompts[3]: structured_outputs.regex is 5",
    )
    with pytest.raises(Refused, match=r"^a\.json: regex is 5$"), within("a.json"):
        raise Refused("wrong_type", "regex", 5)


@pytest.mark.parametrize("error", [one for one, _ in SENTENCES])
def test_an_error_survives_copies_pickles_and_the_wire(error: Refused) -> None:
    wired = error_from(f"[{kind_of(error)}] {text_of(error, as_data=True)}")
    for made in (copy.copy(error), pickle.loads(pickle.dumps(error)), wired):
        assert type(made) is Refused
        assert (made.code, made.field, str(made)) == (error.code, error.field, str(error))
        assert made.renamed(flags).parts == error.renamed(flags).parts


@pytest.mark.parametrize("as_data", [True, False])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Busy("full", retry_after_s=7, max_rows=8, max_queue=256), "OVERLOADED"),
        (Failed("the engine is lost"), "UNAVAILABLE"),
        (Cancelled("cancelled"), "CANCELLED"),
        (Lost("the server ends"), "UNAVAILABLE"),
        (Refused("too_long", "prompt", Amount(9, "tokens")), "INVALID_ARG"),
    ],
)
def test_every_kind_travels_as_a_sentence_or_as_data(error: Exception, kind: str, as_data: bool) -> None:
    made = error_from(f"[{kind_of(error)}] {text_of(error, as_data)}")
    alike = Failed if isinstance(error, Lost) and not as_data else type(error)
    assert (kind_of(error), type(made), str(made)) == (kind, alike, str(error))
    if isinstance(error, Busy) and isinstance(made, Busy):
        seconds, room = (7, (8, 256)) if as_data else (1, (0, 0))
        assert (made.retry_after_s, (made.max_rows, made.max_queue)) == (seconds, room)
    if isinstance(made, Refused):
        assert (made.code, made.field) == (("too_long", "prompt") if as_data else ("other", ""))


def test_what_tritonserver_says_itself_is_a_lost_server_and_ours_is_internal() -> None:
    for text in (
        "Request for unknown model: 'x' has no available versions",
        "[x] y",
        "",
        "] ",
        "[",
        "is [5] x",
    ):
        assert type(error_from(text)) is Lost and str(error_from(text)) == text
    internal = f"[{kind_of(KeyError('a'))}] {text_of(KeyError('a'), as_data=True)}"
    assert (
        type(error_from(internal)) is RuntimeError and str(error_from(internal)) == "[INTERNAL] KeyError: 'a'"
    )


@pytest.mark.parametrize(
    "content", ["{", "[]", "5", "null", '{"said": 5}', '{"code": "x", "said": "y"}', "a] b"]
)
@pytest.mark.parametrize("kind", ["INVALID_ARG", "OVERLOADED", "UNAVAILABLE"])
def test_an_answer_of_another_version_is_still_an_error_of_its_kind(kind: str, content: str) -> None:
    assert kind_of(error_from(f"[{kind}] {content}")) == kind


def test_a_code_of_another_version_is_taken_as_it_is() -> None:
    made = error_from('[INVALID_ARG] {"code": "newer", "field": "n", "said": ["n is 5"]}')
    assert isinstance(made, Refused) and (made.code, made.field, str(made)) == ("other", "n", "n is 5")
