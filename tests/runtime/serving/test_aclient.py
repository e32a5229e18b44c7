"""The client for asyncio against the gRPC server of test_client, and what both do when they try again."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
import pytest
from kit.fake_triton import METRICS, Triton, all_ended, final, pb2, response

from hemiola.runtime.errors import Busy, Cancelled, Failed, Lost, Refused
from hemiola.runtime.serving import aclient, exchange, wire
from hemiola.runtime.serving.aclient import AsyncClient
from hemiola.runtime.serving.client import Client
from hemiola.runtime.serving.error_text import kind_of, text_of

FULL = Busy("5 answers are under way", retry_after_s=0.01)
BUSY = f"[{kind_of(FULL)}] {text_of(FULL, as_data=True)}"
CHAT = [{"role": "user", "content": "é"}]
WHOLE = {"input_ids": [9, 9], "text_output": "é", "output_ids": [5]}


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def error(message: str) -> Any:
    return pb2.ModelStreamInferResponse(error_message=message)


def of_both(client: Client, url: str, method: str, *given: object) -> list[Any]:
    """What a method says in either client: its result, its pieces, or its error."""

    async def ask() -> Any:
        async with AsyncClient(url) as asking:
            made = getattr(asking, method)(*given)
            return [piece async for piece in made] if method == "stream" else await made

    def ask_plainly() -> Any:
        made = getattr(client, method)(*given)
        return list(made) if method == "stream" else made

    found = []
    for one in (ask_plainly, lambda: asyncio.run(asyncio.wait_for(ask(), 60))):
        try:
            found.append(one())
        except Exception as error:
            found.append(error)
    return found


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "RETRY_S", 0.01)


def test_generate_stream_and_chat(url: str, triton: Triton) -> None:
    async def calls() -> None:
        async with AsyncClient(url) as client:
            triton.answers = [final(**WHOLE)]
            outs = await client.generate(["a", [1, 2]])
            assert [(out.prompt_token_ids, out.text, out.metrics) for out in outs] == [
                ([9, 9], "é", METRICS)
            ] * 2
            assert (await client.chat(CHAT)).token_ids == [5]
            triton.answers = [response(text_output="a", output_ids=[1]), final(output_ids=[2])]
            pieces = [piece async for piece in client.stream(CHAT, timeout_s=1.5, request_id="mine")]
            assert [piece.token_ids for piece in pieces] == [[1], [2]]

    run(calls())
    last = triton.requests[-1]
    assert last.id == "mine" and last.parameters["timeout"].int64_param == 1_500_000
    assert last.inputs[0].name == "messages" and '"content"' in last.raw_input_contents[0][4:].decode()
    all_ended(triton, "read to its end")


def test_leaving_a_stream_cancels_it_and_reads_on(url: str, triton: Triton) -> None:
    triton.answers = [response(text_output="a", output_ids=[1])]

    async def leave() -> None:
        async with AsyncClient(url) as client:
            async for _ in client.stream("x"):
                break
            while not triton.cancelled:  # not only once the client is closed
                await asyncio.sleep(0.01)
            task = asyncio.create_task(client.generate(["a", "b"]))
            while len(triton.requests) < 3:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while len(triton.cancelled) < 3:
                await asyncio.sleep(0.01)

    run(leave())
    all_ended(triton, "read to its end")


def test_an_exchange_whose_cancel_nobody_answers_is_kept_for_ever(
    url: str, triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "CANCEL_TIMEOUT_S", 0.1)
    triton.answers, triton.deaf = [response(text_output="a", output_ids=[1])], True

    async def leave() -> None:
        async with AsyncClient(url) as client:
            async for _ in client.stream("x"):
                break
            try:
                while client._wire._exchanges or triton.num_open:  # the server hears of it a little later
                    await asyncio.sleep(0.01)
            finally:
                triton.deaf = False

    run(leave())
    all_ended(triton, "dropped")


def test_a_client_was_never_closed_if_its_server_stood_still_behind_the_last_piece(
    url: str, triton: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that is paused, a network that is gone: nobody ends the stream."""
    monkeypatch.setattr(aclient, "CANCEL_TIMEOUT_S", 0.1)
    triton.answers, triton.deaf = [final(**WHOLE)], True

    async def leave() -> None:
        async with AsyncClient(url) as client:
            assert [output.text for output in await client.generate(["x"])] == ["é"]

    try:
        run(leave())
        all_ended(triton, "dropped")
    finally:
        triton.deaf = False


@pytest.mark.parametrize(
    ("message", "kind", "num_sent"),
    [
        (BUSY, Busy, 3),
        ("[INVALID_ARG] x", Refused, 1),
        ("[UNAVAILABLE] x", Failed, 1),
        ("[CANCELLED] x", Cancelled, 1),
        ("[INTERNAL] x", RuntimeError, 1),
        ("Stub process 'hemiola_0_0' is not healthy.", Lost, 3),
        ("Request for unknown model: 'hemiola' has no available versions", Lost, 3),
    ],
)
def test_only_a_server_that_did_nothing_is_asked_again(
    url: str, triton: Triton, client: Client, message: str, kind: type[Exception], num_sent: int
) -> None:
    triton.answers = [error(message)]
    found = of_both(client, url, "generate", ["a"])
    assert [type(one) for one in found] == [kind] * 2
    assert kind is not Lost or {str(one) for one in found} == {f"the server at {url}: {message}"}
    assert len(triton.requests) == 2 * num_sent


def test_pauses_between_tries_do_not_grow() -> None:
    """A server that is down is asked less and less often; one that is busy, when it said."""
    errors = [Lost("gone"), FULL, Lost("gone"), Lost("gone")]
    pauses: list[float] = []

    class Failing:
        async def read(self) -> exchange.Received:
            return exchange.Received(None, errors[len(pauses)])

    async def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return False

    with pytest.raises(Lost):
        run(exchange.Answer(Failing, 3, pause).read())
    assert pauses == [exchange.RETRY_S, FULL.retry_after_s, 4 * exchange.RETRY_S]


def test_a_request_of_which_a_piece_was_given_out_is_never_sent_again(
    url: str, triton: Triton, client: Client
) -> None:
    triton.answers, triton.dies = [response(text_output="a", output_ids=[1])], True
    assert [type(found) for found in of_both(client, url, "stream", "x")] == [Lost] * 2
    assert len(triton.requests) == 2


def test_a_lost_connection_before_the_first_piece_is_made_again(
    url: str, triton: Triton, client: Client
) -> None:
    class Twice(list):
        """Nothing the first time, and the connection dies; then the answer."""

        def __iter__(self) -> Any:
            triton.dies = len(triton.requests) % 2 == 1
            return iter([] if triton.dies else [final(**WHOLE)])

    triton.answers = Twice()
    assert [found[0].text for found in of_both(client, url, "generate", ["a"])] == ["é"] * 2
    assert len(triton.requests) == 4


def test_a_whole_answer_is_asked_for_again_since_its_stream_then_broke(
    url: str, triton: Triton, client: Client
) -> None:
    triton.answers, triton.dies = [final(**WHOLE)], True
    assert [found[0].text for found in of_both(client, url, "generate", ["a"])] == ["é"] * 2
    assert len(triton.requests) == 2


@pytest.mark.parametrize(
    ("code", "kind", "num_sent"),
    [
        (grpc.StatusCode.UNAVAILABLE, Lost, 3),
        (grpc.StatusCode.CANCELLED, Lost, 3),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, RuntimeError, 1),
        (grpc.StatusCode.UNIMPLEMENTED, RuntimeError, 1),
    ],
)
def test_what_grpc_will_never_carry_is_sent_again(
    url: str, triton: Triton, client: Client, code: grpc.StatusCode, kind: type[Exception], num_sent: int
) -> None:
    triton.dies, triton.dies_of = True, code
    errors = of_both(client, url, "generate", ["a"])
    assert [type(error) for error in errors] == [kind] * 2
    assert [str(error) for error in errors] == [f"the server at {url}: {code.name}: Socket closed"] * 2
    assert len(triton.requests) == 2 * num_sent


def test_a_cancel_that_no_server_takes_raises_an_error_of_grpc(
    url: str, triton: Triton, client: Client
) -> None:
    assert of_both(client, url, "cancel", "a") == [None, None]
    triton.dies = True
    errors = of_both(client, url, "cancel", "a")
    assert [type(error) for error in errors] == [Lost] * 2
    assert [str(error) for error in errors] == [f"the server at {url}: UNAVAILABLE: Socket closed"] * 2


def test_a_cancel_that_the_server_refuses_is_called_done(url: str, triton: Triton, client: Client) -> None:
    triton.answers = [error("Request for unknown model: 'hemiola' is not found")]
    errors = of_both(client, url, "cancel", "a")
    assert [type(error) for error in errors] == [Lost] * 2
    assert str(errors[0]) == f"the server at {url}: Request for unknown model: 'hemiola' is not found"


@pytest.mark.parametrize("call", ["generate", "stream", "chat", "cancel", "check"])
def test_a_client_that_was_closed_raises_an_error_of_grpc(url: str, triton: Triton, call: str) -> None:
    given = [["a"]] if call == "generate" else [CHAT] if call == "chat" else ["a"]

    async def ask() -> None:
        client = AsyncClient(url)
        await client.close()
        made = getattr(client, call)(*([] if call == "check" else given))
        if call == "stream":
            await anext(made)
        else:
            await made

    with pytest.raises(Lost, match="the client was closed"):
        run(ask())
    if call in ("cancel", "chat"):
        with Client(url) as client:
            client.close()
            with pytest.raises(Lost, match="the client was closed"):
                getattr(client, call)(*given)
    assert not triton.requests


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"url": 5}, "url is 5; give a text"),
        ({"url": "\ud800"}, "url is not valid Unicode"),
        ({"model": None}, "model is None; give a text"),
        ({"retries": -1}, "retries is -1; give a whole number, 0 or more"),
        ({"retries": "2"}, "retries is '2'; give"),
        ({"retries": 1.5}, "retries is 1.5; give"),
    ],
)
def test_a_client_that_is_made_wrong_is_a_traceback_or_tries_for_ever(
    url: str, wrong: dict[str, Any], said: str
) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(Refused, match=said):
            kind(**{"url": url} | wrong)


@pytest.mark.parametrize("method", ["generate", "chat", "stream"])
def test_params_that_are_none_at_all_are_taken_for_the_default(url: str, client: Client, method: str) -> None:
    given = {"generate": ["a"], "chat": CHAT, "stream": "a"}[method]
    for error in of_both(client, url, method, given, {}):
        assert isinstance(error, Refused) and "SamplingParams" in str(error)


def test_only_one_client_says_which_models_there_are(url: str) -> None:
    async def enter() -> None:
        async with AsyncClient(url, "x"):
            pass

    sentence = r"has no model 'x' that is ready \(it has hemiola\); pass one of its models"
    for enters in (lambda: Client(url, "x"), lambda: run(enter())):
        with pytest.raises(Refused, match=sentence):
            enters()


def test_no_server_is_refused() -> None:
    async def ask() -> None:
        async with AsyncClient("127.0.0.1:1"):
            pass

    with pytest.raises(Refused, match=r"no server answers at 127\.0\.0\.1:1"):
        run(ask())
