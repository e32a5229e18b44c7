"""The client against a gRPC server in this process, which sees what Triton would see."""

import asyncio
import gc
import json
import math
import struct
import time
from collections.abc import Iterable
from typing import Any

import pytest
from kit.fake_triton import METRICS, Triton, all_ended, final, response
from kit.refused import code_and_field
from kit.served import until
from tritonclient.grpc import service_pb2 as pb2

from hemiola.runtime.api import Logprob, SamplingParams
from hemiola.runtime.errors import Failed, Refused
from hemiola.runtime.serving import client as module
from hemiola.runtime.serving.aclient import AsyncClient
from hemiola.runtime.serving.client import Client
from hemiola.runtime.serving.packing import cancellation, pack
from hemiola.runtime.serving.response import write_prompt_logprobs


def test_pieces_are_the_llms_and_the_stream_is_read_to_its_end(client: Client, triton: Triton) -> None:
    logprobs = json.dumps([{"token_id": 5, "logprob": -0.1, "top": [[5, -0.1], [6, -3.0]]}])
    triton.answers = [
        response(text_output="é😀", output_ids=[5], logprobs=logprobs),
        final(output_ids=[6, 7]),
    ]
    stream = client.stream("hello")
    first, last = next(stream), next(stream)
    all_ended(triton, "read to its end")  # though the caller has not read on
    assert list(stream) == []
    assert (first.text, first.token_ids, first.finish_reason) == ("é😀", [5], None)
    assert first.logprobs == [Logprob(5, -0.1, ((5, -0.1), (6, -3.0)))]
    assert (last.text, last.token_ids, last.finish_reason, last.metrics) == ("", [6, 7], "stop", METRICS)
    assert not triton.cancelled


def test_a_prompts_logprobs_come_with_the_first_tokens(client: Client, triton: Triton) -> None:
    """A line each, as the model writes them."""
    found = [None, Logprob(5, -0.25, ((6, -0.125), (5, -0.25))), Logprob(7, -3.0, ())]
    written = write_prompt_logprobs(found)
    assert len(written.splitlines()) == 3 and json.loads(written)[1]["token_id"] == 5
    triton.answers = [
        response(text_output="a", output_ids=[5], prompt_logprobs=written),
        final(output_ids=[6]),
    ]
    first, last = client.stream("hello", SamplingParams(prompt_logprobs=2))
    assert (first.prompt_logprobs, last.prompt_logprobs) == (found, None)
    triton.answers = [final(output_ids=[6], prompt_logprobs=written, input_ids=[1, 5, 7])]
    (output,) = client.generate(["hello"], SamplingParams(prompt_logprobs=2))
    assert output.prompt_logprobs == found


def sent(request: Any) -> tuple[dict[str, object], dict[str, tuple]]:
    """Parameters and tensors of a request."""
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in request.parameters.items()
    }
    tensors = {
        tensor.name: (tensor.datatype, list(tensor.shape), content)
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
    }
    return parameters, tensors


def test_what_was_set_travels_exactly_and_nothing_else(client: Client, triton: Triton) -> None:
    triton.answers = [final()]
    params = SamplingParams(
        max_tokens=5, min_tokens=2, temperature=0.1, seed=2**64 - 1, stop=("a", "é"), stop_token_ids=(3, 4),
        repetition_penalty=1.1, logit_bias={5: 0.1, 2: -3}, bad_words=["a", "b"], bad_words_ids=[[1, 2], [3]],
        ignore_eos=True, num_drafts=0, priority=-4, cache_salt="é",
        structured_outputs={"json": {"type": "null"}},
    )  # fmt: skip
    list(client.stream([1, 2], params))
    parameters, tensors = sent(triton.requests[0])
    assert parameters == {
        "stream": True,
        "return_input_ids": False,
        "return_metrics": True,
        "error_data": True,
        "max_tokens": 5,
        "temperature": 0.1,
        "ignore_eos": True,
        "seed": -1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "num_drafts": 0,
    }
    assert tensors == {
        "input_ids": ("INT64", [2], struct.pack("<2q", 1, 2)),
        "stop_token_ids": ("INT64", [2], struct.pack("<2q", 3, 4)),
        "priority": ("INT64", [1], struct.pack("<q", -4)),
        "stop": ("BYTES", [2], texts("a", "é")),
        "bad_words": ("BYTES", [2], texts("a", "b")),
        "cache_salt": ("BYTES", [1], texts("é")),
        "logit_bias": ("BYTES", [1], texts('{"5": 0.1, "2": -3.0}')),
        "bad_words_ids": ("BYTES", [1], texts("[[1, 2], [3]]")),
        "structured_outputs": ("BYTES", [1], texts(r'{"json": "{\"type\": \"null\"}"}')),
    }


def texts(*values: str) -> bytes:
    return b"".join(struct.pack("<I", len(value.encode())) + value.encode() for value in values)


@pytest.mark.parametrize(
    "params",
    [{"logit_bias": {}}, {"bad_words": ()}, {"bad_words_ids": ()}, {"cache_salt": ""}, {"num_drafts": None}],
)
def test_what_is_empty_is_not_sent(client: Client, triton: Triton, params: dict) -> None:
    triton.answers = [final()]
    list(client.stream("x", SamplingParams(**params)))
    assert [tensor.name for tensor in triton.requests[0].inputs] == ["text_input"]


@pytest.mark.parametrize("way", ["break", "close", "never read", "client closed"])
def test_leaving_a_stream_cancels_by_id_and_never_drops_it(client: Client, triton: Triton, way: str) -> None:
    triton.answers = [response(text_output="a", output_ids=[1])]
    if way == "break":
        for _ in client.stream("x"):
            break
    else:
        stream = client.stream("x")
        if way != "never read":
            next(stream)
        if way == "close":
            stream.close()
        elif way == "client closed":
            client.close()
        else:
            while not triton.requests:
                time.sleep(0.01)
        del stream
        gc.collect()
    all_ended(triton, "read to its end")
    assert triton.cancelled == [triton.requests[0].id]


@pytest.mark.parametrize("name", ["cancel", "a1"])
def test_a_request_that_is_called_cancel_waits_for_ever(client: Client, triton: Triton, name: str) -> None:
    """Its answer was taken for that of a cancellation."""
    triton.answers = [response(text_output="a", output_ids=[1]), final(text_output="b")]
    for answer in triton.answers:
        answer.infer_response.id = name
    triton.dies = True
    assert "".join(piece.text for piece in client.stream("x", request_id=name)) == "ab"
    triton.answers.pop()
    triton.dies = False
    pieces = client.stream("x", request_id=name)
    next(pieces)
    pieces.close()
    assert triton.cancelled == [name]


def test_a_server_that_does_not_answer_a_cancel_is_given_up(
    client: Client, triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CANCEL_TIMEOUT_S", 0.3)
    triton.answers, triton.deaf = [response(text_output="a", output_ids=[1])], True
    stream = client.stream("x")
    next(stream)
    stream.close()
    all_ended(triton, "dropped")


def test_generate_keeps_the_order_and_a_bound_on_what_is_in_flight(
    client: Client, triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_IN_FLIGHT", 4)

    class Together(list):
        """The first answers come when others are under way."""

        def __iter__(self) -> Any:
            until(lambda: triton.most_open > 1)
            return super().__iter__()

    triton.answers = Together([final(text_output="t", output_ids=[1, 2, 3], input_ids=[8, 9])])
    outputs = client.generate([[i] for i in range(30)], [SamplingParams(max_tokens=i + 1) for i in range(30)])
    assert len(outputs) == 30
    assert (outputs[0].prompt_token_ids, outputs[0].token_ids, outputs[0].text) == ([8, 9], [1, 2, 3], "t")
    assert (outputs[0].finish_reason, outputs[0].metrics, outputs[0].logprobs) == ("stop", METRICS, None)
    assert 2 <= triton.most_open <= 4
    sent = {
        struct.unpack("<q", r.raw_input_contents[0])[0]: r.parameters["max_tokens"].int64_param
        for r in triton.requests
    }
    assert sent == {i: i + 1 for i in range(30)}
    assert not triton.requests[0].parameters["stream"].bool_param
    all_ended(triton, "read to its end")


def test_one_refusal_ends_a_generate(client: Client, triton: Triton) -> None:
    refused = pb2.ModelStreamInferResponse(
        error_message="[INVALID_ARG] prompt is empty; give at least one token"
    )
    triton.answers = [refused]
    with pytest.raises(Refused, match=r"^prompt is empty; give at least one token$"):
        client.generate(["a", "b", "c"])
    all_ended(triton, "read to its end")


def test_an_error_of_the_server_keeps_its_words(client: Client, triton: Triton) -> None:
    piece = response(text_output="a", output_ids=[1])
    triton.answers = [
        piece,
        pb2.ModelStreamInferResponse(error_message="[INTERNAL] the engine failed: ValueError: x"),
    ]
    stream = client.stream("x")
    assert next(stream).text == "a"
    with pytest.raises(RuntimeError, match=r"^\[INTERNAL\] the engine failed: ValueError: x$"):
        next(stream)
    all_ended(triton, "read to its end")


def test_a_lost_engine_is_what_the_llm_says_it_is(client: Client, triton: Triton) -> None:
    triton.answers = [pb2.ModelStreamInferResponse(error_message="[UNAVAILABLE] the engine failed (x)")]
    with pytest.raises(Failed, match=r"^the engine failed \(x\)$"):
        client.generate(["a"])


def test_a_server_that_dies_in_a_stream_is_an_error_with_its_address(
    client: Client, triton: Triton, url: str
) -> None:
    triton.answers, triton.dies = [response(text_output="a", output_ids=[1])], True
    with pytest.raises(RuntimeError, match=f"the server at {url}: UNAVAILABLE: Socket closed"):
        list(client.stream("x"))


@pytest.mark.parametrize("where", ["client.grpc.insecure_channel", "wire.aio.insecure_channel"])
def test_a_server_that_was_away_is_looked_for_every_second(
    url: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """grpc's own wait grows to two minutes, and fails every request meanwhile."""
    asked: dict[str, int] = {}

    def connect(_: str, options: Iterable[tuple[str, int]]) -> None:
        asked.update(options)
        raise ConnectionError

    monkeypatch.setattr(f"hemiola.runtime.serving.{where}", connect)
    with pytest.raises(ConnectionError):
        AsyncClient(url) if "aio" in where else Client(url)
    assert asked["grpc.max_reconnect_backoff_ms"] <= 1000


@pytest.mark.usefixtures("dead_proxy")
@pytest.mark.parametrize("kind", ["client", "async"])
def test_no_proxy_is_asked_for_a_server_on_this_machine(url: str, kind: str) -> None:
    """With `http_proxy` no server answered."""

    async def ask() -> None:
        async with AsyncClient(url) as client:
            await client.check()

    if kind == "client":
        Client(url).close()
    else:
        asyncio.run(ask())


def test_no_server_and_no_model_are_refused_with_a_way_out(url: str) -> None:
    with pytest.raises(Refused, match=r"no server answers at 127.0.0.1:1 \(.*\); start `hemiola serve`"):
        Client("127.0.0.1:1")
    with pytest.raises(
        Refused, match=r"has no model 'x' that is ready \(it has hemiola\); pass one of its models"
    ):
        Client(url, "x")


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("text", None, "prompts is str; pass a list of prompts"),
        (["a"], [SamplingParams(), SamplingParams()], "1 prompts and 2 SamplingParams"),
        (["a"], [{"max_tokens": 1}], "params is dict; pass a SamplingParams"),
        ([b"a"], None, "prompt is bytes; pass text"),
        ([5], None, "prompt is int; pass text"),
        ([[1.5]], None, "input_ids cannot be sent"),
        ([[2**63]], None, "position 0 of the prompt is not in the vocabulary"),
        (["\ud800"], None, "text_input is not valid Unicode at character 0"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_is(
    client: Client, triton: Triton, prompts: Any, params: Any, message: str
) -> None:
    with pytest.raises(Refused, match=message):
        client.generate(
            ["fine", *prompts] if isinstance(prompts, list) and params is None else prompts, params
        )
    assert not triton.requests


DEEP: list[object] = []
for _ in range(100_000):
    DEEP = [DEEP]
UNSENT: dict[str, tuple[dict[str, Any], str]] = {
    "id_alone": ({"request_id": "\ud800"}, "request_id is not valid Unicode at character 0 (a lone"),
    "id_number": ({"request_id": 5}, "request_id is 5; give a text"),
    "timeout_text": ({"timeout_s": "5"}, "timeout_s is '5'; give seconds, more than 0"),
    "timeout_nan": ({"timeout_s": math.nan}, "timeout_s is nan; give seconds, more than 0"),
    "params_copied": ({"params": SamplingParams().model_copy(update={"stop": [1]})}, "stop[0] is 1; give a"),
    "params_seed": ({"params": SamplingParams().model_copy(update={"seed": 2**80})}, "seed is 12089258196"),
    "bytes": ({"prompt": [{"role": "user", "content": b"x"}]}, "messages cannot be sent (Object of type"),
    "deep": ({"prompt": [{"role": "user", "content": DEEP}]}, "messages cannot be sent (nested too deeply);"),
    "nan": ({"prompt": [{"role": "user", "content": math.nan}]}, "messages cannot be sent (Out of range"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSENT)
def test_what_cannot_be_sent_is_a_traceback(case: str) -> None:
    given, said = UNSENT[case]
    asked: dict[str, Any] = {"prompt": "x", "params": SamplingParams(), "stream": True} | given
    with pytest.raises(Refused) as caught:
        pack("m", **asked)
    assert str(caught.value).startswith(said)


def test_an_id_that_no_request_has_is_a_traceback() -> None:
    for asked, code, field in (
        (("m", "\ud800"), "malformed", "request_id"),
        (("m", 5), "wrong_type", "request_id"),
        (("\ud800", "x"), "malformed", "model"),
    ):
        assert code_and_field(lambda asked=asked: cancellation(*asked)) == (code, field)
