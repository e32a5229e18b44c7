"""Texts that hold JSON, in a request to the Triton model: a name that stands twice has no meaning."""

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.refused import code_and_field

from hemiola.runtime.api import MAX_ENTRIES
from hemiola.runtime.errors import Refused
from hemiola.runtime.serving.ask import JSON, read_ask, read_request, wants_data
from hemiola.runtime.serving.http_request import MAX_BODY
from hemiola.runtime.serving.json_size import MOST_VALUES
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


@pytest.mark.parametrize("text", ['{"5": 1, "05": 2}', '{"-0": 1, "0": 2}'])
def test_of_two_spellings_of_a_token_id_the_last_wins(text: str) -> None:
    assert code_and_field(lambda: asked(logit_bias=text)) == ("conflict", "logit_bias")


@pytest.mark.parametrize("key", ["1_0", " 5", "+5", "\u0665", "5.0", ""])
def test_a_key_that_only_python_takes_for_a_token_id_biases_a_token(key: str) -> None:
    assert code_and_field(lambda: asked(logit_bias=json.dumps({key: 1}))) == ("malformed", "logit_bias")


@pytest.mark.parametrize("name", JSON)
def test_a_text_that_holds_json_is_refused_for_its_name_alone(name: str) -> None:
    assert asked(**{name: JSON[name]})


def test_a_long_id_fills_the_log() -> None:
    stream = Stream("\x07\n" * 10_000_000, None, asked(), 0.0)
    line = line_of(stream, [], "success")
    assert len(line) < 300 and line.isprintable()


class Watched(np.ndarray):
    """Nobody may read it."""

    def tolist(self) -> Any:
        raise AssertionError("it was read")

    def __iter__(self) -> Any:
        raise AssertionError("it was read")


def over_grpc(name: str, values: "np.ndarray[Any, Any]", parameters: str = "{}") -> Any:
    tensor = SimpleNamespace(name=lambda: name, as_numpy=lambda: values)
    return SimpleNamespace(inputs=lambda: [tensor], parameters=lambda: parameters, timeout=lambda: 0)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("input_ids", np.zeros(MOST_VALUES + 1, np.int64), f"the limit is {MOST_VALUES}; send fewer"),
        ("stop_token_ids", np.zeros(MAX_ENTRIES + 1, np.int64), "at most 1024 are served; give fewer"),
        ("stop_words", np.full(MAX_ENTRIES + 1, b"a", object), "at most 1024 are served; give fewer"),
        ("temperature", np.zeros(5, np.float32), "temperature has 5 values; give one"),
    ],
)
def test_all_of_a_list_is_read_before_it_is_too_long(
    name: str, values: "np.ndarray[Any, Any]", said: str
) -> None:
    """gRPC has no limit of its own: 3,000,000 stop words held the next request up for seconds."""
    with pytest.raises(Refused) as caught:
        read_request(over_grpc(name, values.view(Watched)))
    assert caught.value.code == "too_long" and str(caught.value).endswith(said)


@pytest.mark.parametrize("name", ["text_input", "structured_outputs", "stop"])
def test_a_text_of_any_length_is_read_over_grpc(name: str) -> None:
    for size, taken in ((MAX_BODY, True), (MAX_BODY + 1, False)):
        values = np.array([b"a" * (size - 1), b"a"][: 2 if name == "stop" else 1], object)
        if name != "stop":
            values[0] = b"a" * size
        if taken:
            assert read_request(over_grpc(name, values))
            continue
        with pytest.raises(Refused, match=f"^{name} has {size} bytes, the limit is {MAX_BODY}; send less$"):
            read_request(over_grpc(name, values))


def test_parameters_of_any_length_are_read_over_grpc() -> None:
    long = json.dumps({"cache_salt": "s" * 2 * MAX_BODY, "error_data": True})
    with pytest.raises(Refused, match=f"^the parameters hold {len(long)} characters, the limit is"):
        read_request(over_grpc("input_ids", np.zeros(3, np.int64), long))
    assert not wants_data(over_grpc("input_ids", np.zeros(3, np.int64), long))
