"""While one caller's large body is read, the event loop serves the others."""

import json
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import requests
from kit.scripted_triton import ScriptedTriton, script
from kit.served import until

from hemiola.runtime.api import Logprob
from hemiola.runtime.serving import ask, json_size
from hemiola.runtime.serving.aside import Aside
from hemiola.runtime.serving.openai import app, body, readers, work
from hemiola.runtime.serving.openai.body import Bodies
from hemiola.runtime.serving.openai.front import Front
from hemiola.runtime.serving.openai.prompt import PromptScores
from hemiola.runtime.serving.openai.reply import Reply
from hemiola.runtime.serving.wire import Wire
from hemiola.runtime.text import Text

USER = {"role": "user", "content": "hi"}


def tool(number: int) -> dict:
    return {"type": "function", "function": {"name": f"tool_{number}"}}


ENUM = {"name": "one", "schema": {"enum": [f"value {i}" for i in range(20_000)]}}
LARGE = {
    "18,000 items": ("responses", {"input": [USER] * 18_000}),
    "8,000 tools": ("chat/completions", {"messages": [USER], "tools": [tool(i) for i in range(8000)]}),
    "1M prompt ids": ("completions", {"prompt": [5] * 1_000_000}),
    "an enum of 20,000 values": (
        "chat/completions",
        {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": ENUM}},
    ),
}


class Held(bytes):
    """Says when nobody has it any more."""

    num_left = 0

    def __del__(self) -> None:
        Held.num_left += 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_body_is_held_until_its_answer_has_ended(
    start: Callable[..., Front],
    triton: ScriptedTriton,
    post: Callable[..., "Future[requests.Response]"],
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    """Some hundred answers at once, with 16 MB each, took all memory."""
    parsed: list[weakref.ref[Any]] = []
    read, plain = Bodies.read, work.parse

    async def read_held(*given: Any) -> Any:
        return Held(await read(*given))

    def parse(*given: Any) -> Any:
        found = plain(*given)
        parsed.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Bodies, "read", read_held)
    monkeypatch.setattr(work, "parse", parse)
    monkeypatch.setattr(Held, "num_left", 0)
    triton.script = script("a", "b")
    triton.gate.clear()
    asked = {"model": "tiny", "messages": [USER], "stream": stream, "user": "x" * 100_000}
    answer = post(f"{start().url}/chat/completions", json.dumps(asked))
    until(lambda: triton.requests)
    until(lambda: Held.num_left and parsed[0]() is None)
    assert not answer.done()
    triton.gate.set()
    assert answer.result(60).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_sent_for_each_choice_is_held_until_its_answer_has_ended(
    start: Callable[..., Front],
    triton: ScriptedTriton,
    post: Callable[..., "Future[requests.Response]"],
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    """1,024 of them with a prompt of 128,000 tokens each took 1 GB."""
    sent: list[Any] = []
    plain = Wire.pack

    def pack(*given: Any) -> list[Any]:
        packed = plain(*given)
        sent.extend(packed)
        return packed

    monkeypatch.setattr(Wire, "pack", pack)
    triton.script = script("a", "b")
    triton.gate.clear()
    asked = {"model": "tiny", "messages": [USER], "stream": stream, "n": 3}
    answer = post(f"{start().url}/chat/completions", json.dumps(asked))
    until(lambda: len(triton.requests) == 3)
    until(lambda: [sys.getrefcount(sent[i]) for i in range(3)] == [2] * 3)  # here, and by that call
    assert not answer.done()
    triton.gate.set()
    assert answer.result(60).status_code == 200


@pytest.mark.parametrize(
    ("route", "given", "more", "total"),
    [
        ("completions", {"prompt": [[5] * 40, [6] * 60], "n": 10}, {"n": 11}, 1100),
        ("completions", {"prompt": [5] * 50, "n": 10, "prompt_logprobs": 0}, {"prompt_logprobs": 1}, 1500),
        ("completions", {"prompt": [5] * 100, "n": 5, "echo": True, "logprobs": 0}, {"n": 6}, 1200),
        ("chat/completions", {"messages": [USER], "n": 18}, {"n": 128}, 3584),
    ],
)
def test_prompts_are_sent_for_each_choice_without_a_limit(
    start: Callable[..., Front],
    triton: ScriptedTriton,
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    given: dict,
    more: dict,
    total: int,
) -> None:
    monkeypatch.setattr(ask, "MOST_TOKENS", 1000)
    triton.script = script("ok")
    url = f"{start().url}/{route}"
    assert requests.post(url, json={"model": "tiny", **given}, timeout=60).status_code == 200
    refused = requests.post(url, json={"model": "tiny", **given, **more}, timeout=60)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "n"), error
    assert f"prompts x n are {total} tokens" in error["message"], error


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_the_log_probabilities_of_a_whole_answer_are_held_without_a_limit(
    start: Callable[..., Front], triton: ScriptedTriton, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    monkeypatch.setattr(ask, "MOST_SCORES", 1050)
    triton.script = script("ok")
    url, is_chat = f"{start().url}/{route}", route.startswith("chat")
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "n": 10}
    asked |= {"messages": [USER], "logprobs": True} if is_chat else {"prompt": "a", "logprobs": 0}
    best = "top_logprobs" if is_chat else "logprobs"
    more = asked | {best: 1, "n": 11}
    assert requests.post(url, json=asked | {best: 1}, timeout=60).status_code == 200
    assert requests.post(url, json=more | {"stream": True}, timeout=60).status_code == 200
    refused = requests.post(url, json=more, timeout=60)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, best)
    assert error["message"] == (
        f"{best} of 550 tokens may be 1100, the limit is 1050; stream, or lower n or max_tokens"
    )
    all_of_it = more | {"max_tokens": 10**6, "n": 1}  # that the context holds
    assert requests.post(url, json=all_of_it, timeout=60).status_code == 200


class Gate:
    """Holds each call of a function up until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def around(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **kwargs: Any) -> Any:
            self.entered.set()
            assert self.opened.wait(300)
            return plain(*args, **kwargs)

        return held


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture
def post() -> Iterator[Callable[..., "Future[requests.Response]"]]:
    with ThreadPoolExecutor(8) as threads:
        yield lambda url, body: threads.submit(requests.post, url, data=body, timeout=300)


def turns(front: Front) -> None:
    """Its loop answers somebody else."""
    assert requests.get(f"{front.url}/models", timeout=60).status_code == 200


@pytest.mark.parametrize("case", LARGE)
def test_a_large_body_holds_up_everybody_while_it_is_read(
    start: Callable[..., Front],
    triton: ScriptedTriton,
    gate: Gate,
    post: Callable[..., "Future[requests.Response]"],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    """And Python's lock, if it is read in this process."""
    monkeypatch.setattr(Aside, "run", gate.around(Aside.run))
    monkeypatch.setattr(work, "parse", None)
    triton.script = script("ok")
    route, given = LARGE[case]
    front = start()
    answer = post(f"{front.url}/{route}", json.dumps({"model": "tiny", **given}).encode())
    assert gate.entered.wait(60)
    turns(front)
    gate.opened.set()
    too_long = case in ("18,000 items", "8,000 tools", "1M prompt ids")
    assert answer.result().status_code == (400 if too_long else 200)
    if too_long:
        assert answer.result().json()["error"]["code"] == "context_length_exceeded"
        assert not triton.requests


SOME_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}},
}
ANY_SIZE = [
    ("completions", {"prompt": ["a", "bc"], "n": 2, "logprobs": 1, "echo": True}),
    ("completions", {"prompt": [5, 6], "return_token_ids": True, "stream": True}),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}),
    ("completions", {"model": "nobody", "prompt": "a"}),
    ("completions", {"prompt": "a", "max_tokens": 0}),
    ("chat/completions", {"messages": [USER], "tools": [SOME_TOOL], "logprobs": True, "top_logprobs": 1}),
    ("chat/completions", {"messages": [USER], "tools": [SOME_TOOL], "stream": True}),
    ("chat/completions", {"messages": [USER], "structured_outputs": {"regex": 5}}),
    ("responses", {"input": "hi", "metadata": {"a": "b"}, "stream": True}),
    ("responses", {"input": [USER], "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"}),
    ("../tokenize", {"messages": [USER], "return_token_strs": True}),
    ("../detokenize", {"tokens": [5, 10**6]}),
]


def test_a_large_body_has_another_answer_than_a_small_one(
    start: Callable[..., Front], triton: ScriptedTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that becomes of it comes from another process."""
    said = ["<tool_call>\n<function=f>\n<para", "meter=a>\n5\n</parameter>\n</function>\n</tool_call>"]
    triton.script = [piece._replace(logprobs=[Logprob(7, -1.0, ((7, -1.0),))]) for piece in script(*said)]
    front = start()

    def answer(route: str, given: dict) -> tuple[int, list[str], str, list[Any]]:
        before = len(triton.requests)
        found = requests.post(f"{front.url}/{route}", json={"model": "tiny"} | given, timeout=60)
        text = re.sub(r"[a-z]+[-_][0-9a-f]{24,}|\"created(_at)?\": ?\d+", "", found.text)
        sent = [
            (one.inputs, one.raw_input_contents, dict(one.parameters)) for one in triton.requests[before:]
        ]
        headers = [name for name in found.headers if name != "Date"]
        return found.status_code, headers, text, sorted(map(str, sent))

    small = [answer(*one) for one in ANY_SIZE]
    monkeypatch.setattr(json_size, "MUCH", (0, 0, 0))
    monkeypatch.setattr(work, "parse", None)
    assert [answer(*one) for one in ANY_SIZE] == small
    assert {status for status, *_ in small} == {200, 400, 404}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (work, "render"),
        (work, "guide"),
        (Text, "encode"),
        (app.ApiRequest, "params"),
        (Wire, "pack"),
        (Reply, "text"),
    ],
)
def test_a_part_of_the_work_on_a_large_body_is_done_in_the_event_loop(
    start: Callable[..., Front],
    triton: ScriptedTriton,
    gate: Gate,
    post: Callable[..., "Future[requests.Response]"],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
) -> None:
    monkeypatch.setattr(readers, "SMALL", 100)
    monkeypatch.setattr(owner, name, gate.around(getattr(owner, name)))
    triton.script = script(*["a"] * 200)
    front = start()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a" * 200}]}
    answer = post(f"{front.url}/chat/completions", json.dumps(body).encode())
    assert gate.entered.wait(60)
    turns(front)
    gate.opened.set()
    assert answer.result().json()["usage"]["completion_tokens"] == 200


def test_the_scores_that_a_stream_echoes_are_written_in_the_event_loop(
    start: Callable[..., Front],
    triton: ScriptedTriton,
    gate: Gate,
    post: Callable[..., "Future[requests.Response]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all of a prompt at once, 20 and more to a token. What comes meanwhile stays behind them."""
    monkeypatch.setattr(readers, "SMALL", 100)
    monkeypatch.setattr(PromptScores, "echoed", gate.around(PromptScores.echoed))
    first, *others = script(*"abcd")
    score = Logprob(7, -1.0, ((7, -1.0), (8, -2.0)))
    found = [None, *[score] * 49]
    triton.script = [first._replace(logprobs=[score], prompt_logprobs=found), *others]
    front = start()
    body = {"model": "tiny", "prompt": [5] * 50, "echo": True, "logprobs": 2, "stream": True}
    answer = post(f"{front.url}/completions", json.dumps(body).encode())
    assert gate.entered.wait(60)
    turns(front)
    gate.opened.set()
    *events, done = (line for line in answer.result().text.split("\n\n") if line)
    said = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert [text[-1:] for text in said] == list("abcd") and done == "data: [DONE]"


@pytest.mark.parametrize("route", ["tokenize", "detokenize"])
def test_tokenizing_for_one_caller_holds_up_the_others(
    start: Callable[..., Front],
    gate: Gate,
    post: Callable[..., "Future[requests.Response]"],
    monkeypatch: pytest.MonkeyPatch,
    route: str,
) -> None:
    monkeypatch.setattr(app, route, gate.around(getattr(app, route)))
    front = start()
    given = {"prompt": "a " * 9000} if route == "tokenize" else {"tokens": [5] * 9000}
    answer = post(f"{front.url[:-3]}/{route}", json.dumps({"model": "tiny", **given}).encode())
    assert gate.entered.wait(60)
    turns(front)
    gate.opened.set()
    assert answer.result().status_code == 200


def test_a_long_prompt_waits_behind_the_largest(
    start: Callable[..., Front],
    triton: ScriptedTriton,
    gate: Gate,
    post: Callable[..., "Future[requests.Response]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton.script = script("ok")
    monkeypatch.setattr(Aside, "run", gate.around(Aside.run))
    front = start()
    large = json.dumps({"model": "tiny", "prompt": [5] * 10**6}).encode()
    answers = [post(f"{front.url}/completions", large) for _ in range(4)]
    assert gate.entered.wait(60)
    medium = json.dumps({"model": "tiny", "prompt": "a", "user": "a" * 9000}).encode()
    assert post(f"{front.url}/completions", medium).result().status_code == 200
    gate.opened.set()
    assert {answer.result().status_code for answer in answers} == {400}


def test_bodies_that_wait_to_be_read_fill_the_memory(
    start: Callable[..., Front],
    triton: ScriptedTriton,
    gate: Gate,
    post: Callable[..., "Future[requests.Response]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that were whole were not counted, and one is read at a time."""
    triton.script = script("ok")
    monkeypatch.setattr(Aside, "run", gate.around(lambda _, function, body, *more: function(body, *more)))
    monkeypatch.setattr(body, "MOST_BODIES", 3)
    bodies = Bodies(100_000)
    monkeypatch.setattr(app, "Bodies", lambda _: bodies)
    front = start()
    url = f"{front.url}/completions"
    large = json.dumps({"model": "tiny", "prompt": [5] * 33_000}).encode()  # of at most 100,000 bytes
    answers = [post(url, large) for _ in range(3)]
    until(lambda: bodies._num_bytes == 3 * len(large) and not bodies.num_reading)
    assert requests.post(url, data=large, timeout=60).status_code == 429
    assert requests.post(url, json={"model": "tiny", "prompt": "a"}, timeout=60).status_code == 200
    gate.opened.set()
    assert {answer.result().status_code for answer in answers} == {400}  # for its length
    assert requests.post(url, data=large, timeout=60).status_code == 400
    assert bodies._num_bytes == 0


def test_a_caller_that_left_is_read_on(
    start: Callable[..., Front],
    triton: ScriptedTriton,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it had sent is not even begun, if its thread was busy until then."""
    parsed: list[int] = []

    def run(_: Aside, function: Callable[..., Any], body: bytearray, *arguments: Any) -> Any:
        parsed.append(len(body))
        return gate.around(function)(body, *arguments)

    monkeypatch.setattr(Aside, "run", run)
    front = start()
    url, sent = f"{front.url}/completions", json.dumps({"model": "tiny", "prompt": [5] * 10**5}).encode()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(requests.post, url, data=sent, timeout=300)
        assert gate.entered.wait(60)
        with pytest.raises(requests.Timeout):
            requests.post(url, data=sent, timeout=0.5)
        until(lambda: parsed == [len(sent)])
        turns(front)  # so the loop has seen it leave
        gate.opened.set()
        first.result()
    turns(front)
    assert requests.post(url, data=sent, timeout=60).status_code == 400
    assert len(parsed) == 2, "that of the caller that had left was read"
