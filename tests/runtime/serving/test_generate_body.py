"""Bodies of the generate endpoints: what tritonserver would answer 500 is refused by name before it."""

import json
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from hemiola.runtime.errors import Refused
from hemiola.runtime.serving.generate_body import GENERATE, WANTED, check_generate, inputs

CONFIG = Path(__file__).resolve().parents[3] / "model_repo/hemiola/config.pbtxt"
ALONE = "\ud800"


def test_every_input_of_the_config_is_checked() -> None:
    config = text_format.Parse(CONFIG.read_text(), model_config_pb2.ModelConfig())
    kind = model_config_pb2.DataType.Name
    found = {one.name: (kind(one.data_type).removeprefix("TYPE_"), list(one.dims)) for one in config.input}
    assert {name: (own.kind, [-1 if own.is_list else 1]) for name, own in inputs().items()} == found
    assert {own.kind for own in inputs().values()} == set(WANTED)


WRONG = [
    (b"", "the body is no JSON (Expecting value: line 1 column 1 (char 0)); send an object"),
    (b"{", "the body is no JSON ("),
    (b'{"text_input": "a"} x', "the body is no JSON (Extra data"),
    (b"[1]", "the body is [1]; send an object"),
    (b'{"max_tokens": ' + b"9" * 5000 + b"}", "the body is no JSON (a number of too many digits)"),
    (b'{"text_input": ' + b"[" * 5000, "the body is no JSON (nested too deeply)"),
    (b'{"n": 1, "n": 2}', "the key 'n' stands twice in one object; give it once"),
    ({"max_tokens": "2"}, "max_tokens is '2'; give a whole number"),
    ({"max_tokens": None}, "max_tokens is null; leave it out, or give a whole number"),
    ({"max_tokens": 4.0}, "max_tokens is 4.0; give a whole number"),
    ({"max_tokens": True}, "max_tokens is True; give a whole number"),
    ({"max_tokens": [1, 2]}, "max_tokens has 2 values; give one"),
    ({"max_tokens": []}, "max_tokens has 0 values; give one"),
    ({"max_tokens": 2**63}, f"max_tokens is {2**63}, which needs more than 64 bits; give a smaller number"),
    ({"seed": -(2**63) - 1}, f"seed is {-(2**63) - 1}, which needs more than 64 bits"),
    (b'{"max_tokens": 1e400}', "max_tokens is inf; give a whole number"),
    (b'{"temperature": 1e400}', "temperature is inf; give a number"),
    ({"temperature": 10**400}, "temperature is 1000000"),
    ({"temperature": "1"}, "temperature is '1'; give a number"),
    ({"stream": 1}, "stream is 1; give true or false"),
    ({"text_input": 5}, "text_input is 5; give a text"),
    ({"text_input": {"a": 1}}, "text_input is {'a': 1}; give a text"),
    ({"text_input": ["a", "b"]}, "text_input has 2 values; give one"),
    ({"text_input": f"a{ALONE}"}, "text_input is not valid Unicode at character 1 (a lone surrogate, or no"),
    ({"stop": ["é", ALONE]}, "stop[1] is not valid Unicode at character 0 (a lone surrogate, or no UTF-8)"),
    (b'{"text_input": "a\xff"}', "text_input is not valid Unicode at character 1"),
    (b'{"id": "a\xff"}', "id is not valid Unicode at character 1"),
    (b'{"foo": "\xed\xa0\x80"}', "foo is not valid Unicode at character 0"),
    (b'{"\xff": 1}', "unknown key '\\udcff'; leave it out"),
    ({"input_ids": [1, "a"]}, "input_ids[1] is 'a'; give a whole number"),
    ({"input_ids": [[1, 2], [3]]}, "input_ids[0] is [1, 2]; give a whole number"),
    ({"input_ids": [2**63]}, f"input_ids[0] is {2**63}, which needs more than 64 bits"),
    ({"messages": [{"role": "user"}] * 2}, 'messages is list; give its JSON as a text, such as "[{'),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs is dict; give its JSON as a text, such as "),
    ({"id": 5}, "id is 5; give a text"),
    ({"id": "x" * 1025}, "id has 1025 characters, the limit is 1024; give a shorter one"),
    ({str(i): i for i in range(129)}, "the body has 129 keys, the limit is 128; leave those out"),
    ({"parameters": {str(i): i for i in range(129)}}, "parameters has 129 keys, the limit is 128"),
    ({"stop": ["x"] * 1025}, "stop has 1025 entries, at most 1024 are served; give fewer"),
    ({"stop_words": ["x"] * 1025}, "stop has 1025 entries, at most 1024 are served"),
    ({"cancel": ["x"] * 1025}, "cancel has 1025 ids, the limit is 1024; send several requests"),
    ({"input_ids": [5] * (2**20 + 1)}, f"input_ids has {2**20 + 1} values, the limit is {2**20}"),
    ({"parameters": 5}, "parameters is 5; give an object"),
    ({"parameters": {"a": ALONE}}, "a is not valid Unicode at character 0"),
    ({"parameters": {"stream": 1}}, "stream is 1; give true or false"),
    ({"parameters": {"stop": [5]}}, "stop[0] is 5; give a text"),
    ({"parameters": {"text_input": {"a": 1}}}, "text_input is {'a': 1}; give a text"),
    ({"parameters": {"input_ids": [[1]]}}, "input_ids[0] is [1]; give a whole number"),
    (b'{"foo": 1e400}', "foo is inf; give a whole number"),
    (b'{"foo": {"a": [1e400]}}', "foo is {'a': [inf]}; give a text, a whole number, true or false"),
    ({"parameters": {"timeout": None}}, "timeout is None; give a text, a whole number"),
    ({"foo": 2**64}, f"foo is {2**64}, which needs more than 64 bits"),
    ({ALONE: 1}, "unknown key '\\ud800'; leave it out"),
    ({"\0": 1}, "unknown key '\\x00'; leave it out"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "said"), WRONG)
def test_a_wrong_type_is_answered_500(body: object, said: str) -> None:
    """Or as our own fault, [INTERNAL], as bytes that are no UTF-8 were."""
    with pytest.raises(Refused) as caught:
        check_generate(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert str(caught.value).startswith(said) and str(caught.value).isprintable()


@pytest.mark.parametrize(
    "given",
    [
        {"stream": True},
        {"stream": [True]},
        {"streaming": True},
        {"max_tokens": 1, "stream": True},
        {"parameters": {"stream": True}},
    ],
)
def test_a_stream_at_the_route_for_one_response_is_answered_200_with_an_error(given: dict) -> None:
    body = json.dumps({"text_input": "a"} | given).encode()
    check_generate(body)
    with pytest.raises(
        Refused, match=r"stream(ing)? is True, but generate sends one response; use generate_"
    ):
        check_generate(body, one_response=True)
    check_generate(b'{"text_input": "a", "stream": false}', one_response=True)


@pytest.mark.parametrize(
    "body",
    [
        {},  # the model says what is missing
        {"text_input": "é😀", "max_tokens": 2, "temperature": 1, "top_p": 0.5, "stream": False, "stop": "x"},
        {"text_input": ["a"], "max_tokens": [2], "stop": [], "input_ids": 5, "seed": -(2**63)},
        {"input_ids": list(range(5)), "id": "x", "timeout": 5, "parameters": {"max_tokens": 2, "a": True}},
        {"bar": 1.5},  # the model says that it is unknown
        {str(i): i for i in range(128)},
        {"id": "x" * 1024, "stop": ["x"] * 1024, "input_ids": [5] * 2**20},
        b'\xef\xbb\xbf{"text_input": "a"}',
        b'{"text_input": "a", "temperature": NaN}',  # the model says what is wrong
    ],
)
def test_what_tritonserver_takes_goes_on(body: object) -> None:
    check_generate(body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    "path", ["m/generate", "m/generate_stream", "m/versions/1/generate", "m/generate?x=1"]
)
def test_each_generate_endpoint_is_known(path: str) -> None:
    assert GENERATE.fullmatch(f"POST /v2/models/{path} HTTP/1.1".encode())
    assert not GENERATE.fullmatch(f"GET /v2/models/{path} HTTP/1.1".encode())
    assert not GENERATE.fullmatch(b"POST /v2/models/generate/infer HTTP/1.1")
