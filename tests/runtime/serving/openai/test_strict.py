"""JSON made of what models write: whatever they write, strict parsers take it."""

import json
import random

import pytest

from hemiola.runtime.serving.openai.strict import StrictObject, from_json, from_python, to_json

SOUP = [
    *'{}[]",: \\\n',
    '"a"',
    '"b": ',
    "1",
    "-0.5e3",
    "1e999",
    "NaN",
    "true",
    "nul",
    "\\u00e9",
    "\\ud800",
    "\\u12",
    "é",
]


def written(text: str) -> str:
    strict = StrictObject()
    return "".join(map(strict.push, text)) + strict.close()


def no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    assert len(dict(pairs)) == len(pairs), "a name twice"
    return dict(pairs)


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("seed", range(4))
def test_any_soup_becomes_an_object(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(500):
        soup = "{" + "".join(dice.choices(SOUP, k=dice.randint(0, 30)))
        made = written(soup)
        found = json.loads(made, object_pairs_hook=no_twins, parse_constant=no_constant)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()  # finite numbers, no lone surrogates
        assert isinstance(found, dict), soup


def test_json_passes_as_it_is() -> None:
    text = '{"a" : [1, -0.5e3,true , {"\\u00e9\\n": null}], "b":{}, "c": "\\ud83d\\ude00 é" }'
    assert written(text) == text


def test_what_comes_behind_an_object_is_dropped() -> None:
    assert written('{"a": 1}, "b": 2} x') == '{"a": 1}'


def test_names_that_become_the_same_are_one() -> None:
    assert to_json(from_json('{"\\ud800": 1, "\\udc00": 2}')) == '{"\ufffd": 2}'


def test_long_texts_are_not_read_as_python() -> None:
    assert from_python(repr("x" * 9_000)) == "x" * 9_000
    assert from_python(repr("x" * 11_000)) is ...


def test_the_work_for_white_space_behind_a_comma_grows_with_it() -> None:
    """400,000 spaces took 7 s of the event loop."""
    copied = 0

    class Watched(StrictObject):
        def __setattr__(self, name: str, value: object) -> None:
            nonlocal copied
            copied += len(value) if isinstance(value, str) else 0
            super().__setattr__(name, value)

    strict, text = Watched(), '{"a": 1,' + " " * 20_000 + '"b": 2}'
    assert "".join(map(strict.push, text)) == text
    assert copied < 10 * len(text)
