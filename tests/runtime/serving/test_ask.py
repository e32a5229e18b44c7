"""Texts that hold JSON, in a request to the Triton model: a name that stands twice has no meaning."""

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.refused import code_and_field

from hemiola.runtime.errors import Refused
from hemiola.runtime.serving.ask import JSON, read_ask, read_request
from hemiola.runtime.serving.stream import Stream, line_of


def request(parameters: str = "{}", **texts: str) -> Any:
    """As the Python backend hands it over."""
    tensors = [
        SimpleNamespace(
            name=lambda name=name: name, as_numpy=lambda text=text: np.array([text.encode()], object)
        )
        for name, text in {"text_input": "a", **texts}.items()
    ]
    return SimpleNamespace(inputs=lambda: tensors, parameters=lambda: parameters, timeout=lambda: 0)


def asked(parameters: str = "{}", **texts: str) -> Any:
    found: Mapping[str, Any] = read_request(request(parameters, **texts))
    return read_ask({name: value for name, value in found.items() if value != "a" or "messages" not in texts})


@pytest.mark.parametrize(
    ("name", "text", "twice"),
    [
        ("parameters", '{"seed": 1, "max_tokens": 2, "seed": 3}', "seed"),
        ("parameters", r'{"seed": 1, "s\u0065ed": 3}', "seed"),
        ("logit_bias", '{"5": 1, "6": 2, "5": 3}', "5"),
        ("structured_outputs", '{"regex": "a", "regex": "b"}', "regex"),
        ("structured_outputs", '{"json": {"type": "object", "type": "string"}}', "type"),
        ("structured_outputs", json.dumps({"json": '{"type": "object", "type": "string"}'}), "type"),
        ("messages", '[{"role": "user", "content": "a", "role": "system"}]', "role"),
        ("messages", '[{"role": "user", "content": "a", "tool_calls": [{"id": 1, "id": 2}]}]', "id"),
    ],
)
def test_of_a_name_that_stands_twice_the_last_wins(name: str, text: str, twice: str) -> None:
    with pytest.raises(Refused, match=f"^{name}.*the key '{twice}' stands twice in one object"):
        asked(**{name: text})


@pytest.mark.parametrize("text", ['{"5": 1, "05": 2}', '{"5": 1, " 5": 1}', '{"-0": 1, "0": 2}'])
def test_of_two_spellings_of_a_token_id_the_last_wins(text: str) -> None:
    assert code_and_field(lambda: asked(logit_bias=text)) == ("conflict", "logit_bias")


@pytest.mark.parametrize("name", JSON)
def test_a_text_that_holds_json_is_refused_for_its_name_alone(name: str) -> None:
    assert asked(**{name: JSON[name]})


def test_a_long_id_fills_the_log() -> None:
    stream = Stream("\x07\n" * 10_000_000, None, asked(), 0.0)
    line = line_of(stream, [], "success")
    assert len(line) < 300 and line.isprintable()
