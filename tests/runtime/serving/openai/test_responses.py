"""`/v1/responses`, `/tokenize` and their like, before a scripted tritonserver, by the official client."""

import inspect
import json
from collections.abc import Callable

import pytest
import requests
from kit.scripted_triton import ScriptedTriton, script
from openai import BadRequestError, OpenAI

from hemiola import __version__
from hemiola.runtime.api import Metrics, Piece
from hemiola.runtime.errors import Refused
from hemiola.runtime.serving.openai.answer import Expected
from hemiola.runtime.serving.openai.errors import ApiError
from hemiola.runtime.serving.openai.front import Front
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.serving.openai.parts import ENCODER
from hemiola.runtime.serving.openai.response_reply import ResponseChoice, ResponseReply
from hemiola.runtime.serving.openai.responses import (
    InputMessage,
    InputReasoning,
    Messages,
    ReasoningText,
    ResponsesRequest,
)
from hemiola.runtime.serving.openai.schema import PASSED, parse
from hemiola.runtime.text import Text

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "now",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "strict": False,
}
SAID = (
    "hm, 日本\n</think>\n\nI ask.\n\n<tool_call>\n<function=weather>\n"
    "<parameter=city>\nKyōto 👩‍👩‍👧\n</parameter>\n"
    "<parameter=days>\n12\n</parameter>\n</function>\n</tool_call>"
)
ARGUMENTS = {"city": "Kyōto 👩‍👩‍👧", "days": 12}


def cut(text: str, width: int) -> list[str]:
    return [text[i : i + width] for i in range(0, len(text), width)]


def test_a_response_has_the_thought_the_text_and_the_call(client: OpenAI, triton: ScriptedTriton) -> None:
    triton.script = script(*cut(SAID, 7), cached_tokens=2)
    answer = client.responses.create(model="tiny", input="hi", instructions="Be brief.", tools=[TOOL])
    thought, message, call = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm, 日本\n")
    assert answer.output_text == message.content[0].text == "I ask."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", ARGUMENTS)
    assert (answer.status, answer.store, answer.instructions) == ("completed", False, "Be brief.")
    assert answer.usage.output_tokens == len(triton.script)
    assert answer.usage.input_tokens == len(triton.inputs()["input_ids"])
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < len(triton.script)


@pytest.mark.parametrize("width", [1, 3, 16, 1000])
def test_streamed_events_add_up_to_the_response(client: OpenAI, triton: ScriptedTriton, width: int) -> None:
    triton.script = script(*cut(SAID, width))
    with client.responses.stream(model="tiny", input="hi", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    for item, (kind, field) in zip(
        final.output,
        [("reasoning_text", "text"), ("output_text", "text"), ("function_call_arguments", "arguments")],
        strict=True,
    ):
        own = [event for event in events if getattr(event, "item_id", None) == item.id]
        deltas = "".join(event.delta for event in own if event.type == f"response.{kind}.delta")
        (done,) = [event for event in own if event.type == f"response.{kind}.done"]
        assert deltas == getattr(done, field)
    assert json.loads(final.output[2].arguments) == ARGUMENTS
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    done = [event.output_index for event in events if event.type == "response.output_item.done"]
    assert added == done == [0, 1, 2]


def test_a_response_that_is_cut_is_incomplete(client: OpenAI, triton: ScriptedTriton) -> None:
    triton.script = script("\n", "a", "</think>b", reason="length")
    answer = client.responses.create(model="tiny", input="hi", max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[-1].status == "incomplete"
    assert answer.usage.output_tokens_details.reasoning_tokens == 2
    with client.responses.stream(model="tiny", input="hi", max_output_tokens=3) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_a_turn_sent_back_is_the_prompt_that_a_chat_makes_of_it(
    client: OpenAI, triton: ScriptedTriton
) -> None:
    triton.script = script(*cut(SAID, 7))
    first = client.responses.create(model="tiny", input="hi", tools=[TOOL])
    call = first.output[2]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [{"role": "user", "content": "hi"}, *first.output, result]
    client.responses.create(model="tiny", input=items, tools=[TOOL])
    prompt = triton.inputs()["input_ids"]
    function = {"name": "weather", "arguments": call.arguments}
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "I ask.",
                "reasoning_content": "hm, 日本\n",
                "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"},
        ],
        tools=[{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}],
    )
    assert triton.inputs()["input_ids"] == prompt


def test_json_by_schema(client: OpenAI, triton: ScriptedTriton) -> None:
    triton.script = script('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    client.responses.create(model="tiny", input="hi", text=text)
    assert "structured_outputs" in triton.inputs()


REFUSED = {
    "previous_response_id": "resp_1",
    "conversation": "conv_1",
    "background": True,
    "truncation": "auto",
    "tools": [{"type": "web_search"}],
    "input": [{"type": "item_reference", "id": "x"}],
    "include": ["message.output_text.logprobs"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_a_memory_or_other_tools_is_refused_by_name(
    client: OpenAI, triton: ScriptedTriton, name: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(**{"model": "tiny", "input": "hi", name: REFUSED[name]})
    assert caught.value.param.startswith(name) and not triton.requests


@pytest.mark.parametrize("given", [{"max_tokens": 5}, {"n": 2}, {"return_token_ids": True}, {"input": []}])
def test_a_chats_option_is_refused_by_name(
    client: OpenAI, triton: ScriptedTriton, given: dict[str, object]
) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(
            **{"model": "tiny", "input": "hi"} | ({"input": []} if "input" in given else {}),
            extra_body={name: value for name, value in given.items() if name != "input"},
        )
    assert caught.value.param == next(iter(given)) and not triton.requests


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
ASKED = {"role": "user", "content": "hi"}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {}}
# name: (what the body has beside the model, param, a part of the message)
OWN_NAMES = {
    "limit": ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0; give at least 1"),
    "min": ({"max_output_tokens": 5, "min_tokens": 9}, "min_tokens", "min_tokens is 9, max_output_tokens is"),
    "item_key": ({"input": [ASKED | {"x": 1}]}, "input[0].x", "unknown option 'input[0].x'"),
    "item_type": ({"input": [{"type": "audio"}]}, "input[0]", "is {'type': 'audio'}; give 'message', "),
    "no_item_type": ({"input": [{"x": 1}]}, "input[0].type", "input[0].type is missing"),
    "part": ({"input": [ASKED | {"content": [5]}]}, "input[0].content[0]", "is 5; give an object"),
    "no_role": ({"input": [{"type": "message", "content": "x"}]}, "input[0].role", "is missing"),
    "call": ({"input": [ASKED, CALL | {"arguments": "{"}]}, "input[1].arguments", "is not a JSON object"),
    "second_call": ({"input": [CALL, CALL | {"arguments": "[]"}]}, "input[1].arguments", "is not a JSON"),
    "hidden_call": ({"model": "bare", "input": [ASKED, CALL]}, "input[1]", "input[1] changes nothing"),
    "schema_name": ({"text": {"format": SCHEMA | {"name": "a b"}}}, "text.format.name", "is 'a b'; give"),
    "schema": ({"text": {"format": SCHEMA | {"schema": 5}}}, "text.format.schema", "is 5; give an object"),
    "tool_name": ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name", "is 'a b'; give a text"),
    "two_tools": ({"tools": [TOOL, TOOL]}, "tools", "two tools have one name"),
    "choice": ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "tool_choice names 'f'"),
    "effort": ({"reasoning": {"effort": "most"}}, "reasoning.effort", "is 'most'; give 'none'"),
    "two_grammars": (
        {"text": {"format": SCHEMA}, "structured_outputs": {"regex": "a"}}, "structured_outputs",
        "structured_outputs beside text.format or a forced tool_choice",
    ),
    "no_text": ({"model": "ids"}, "input", "input is text, but model ids has no tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("case", OWN_NAMES)
def test_errors_name_a_chats_fields(start: Callable[..., Front], triton: ScriptedTriton, case: str) -> None:
    given, param, message = OWN_NAMES[case]
    body = {"model": "tiny", "input": "hi"} | given
    answer = requests.post(f"{start().url}/responses", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"] and "messages" not in error["message"]
    assert not triton.requests


GRAMMAR = Refused("malformed", "structured_outputs", 5)


@pytest.mark.parametrize(
    ("given", "error", "param"),
    [
        ({}, Refused("too_long", "prompt", 600), "input"),
        ({"text": {"format": SCHEMA}}, GRAMMAR, "text.format"),
        ({"tools": [TOOL], "tool_choice": "required"}, GRAMMAR, "tools"),
        ({"structured_outputs": {"regex": "a"}}, GRAMMAR, "structured_outputs"),
    ],
)
def test_what_the_engine_refuses_has_a_chats_name(
    start: Callable[..., Front], triton: ScriptedTriton, given: dict, error: Refused, param: str
) -> None:
    triton.script = [error]
    body = {"model": "bare", "input": "hi", "stream": True} | given
    found = requests.post(f"{start().url}/responses", json=body, timeout=60).json()["error"]
    assert (found["param"], found["message"]) == (param, f"{param} is {error.value}")


def test_every_option_of_the_official_client_is_served_or_refused_by_name(
    client: OpenAI, triton: ScriptedTriton
) -> None:
    transport = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    asked = set(inspect.signature(client.responses.create).parameters) - transport
    for name in asked - set(ResponsesRequest.model_fields) - set(PASSED):
        with pytest.raises(BadRequestError, match=f"unknown option '{name}'"):
            client.responses.create(**{"model": "tiny", "input": "hi", name: {"type": "x"}})


def test_an_error_behind_the_first_event_ends_the_stream_as_failed(
    client: OpenAI, triton: ScriptedTriton
) -> None:
    triton.script = [*script("a", "b")[:1], "[UNAVAILABLE] gone"]
    with client.responses.stream(model="tiny", input="hi") as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.failed"


def test_effort_reaches_a_template_that_can_switch_thoughts_off(
    client: OpenAI, triton: ScriptedTriton
) -> None:
    triton.script = script("ok")
    prompts = []
    for effort in ("none", "high"):
        client.responses.create(model="tiny", input="hi", reasoning={"effort": effort})
        prompts.append(triton.inputs()["input_ids"])
        user = [{"role": "user", "content": "hi"}]
        client.chat.completions.create(model="tiny", messages=user, reasoning_effort=effort)
        assert triton.inputs()["input_ids"] == prompts[-1]
    assert prompts[0] != prompts[1]


def test_tokens_of_a_text_and_of_a_conversation_and_back(
    start: Callable[..., Front], text: Text, triton: ScriptedTriton
) -> None:
    url = start().url.removesuffix("/v1")
    said = requests.post(
        f"{url}/tokenize", json={"model": "tiny", "prompt": "héllo", "return_token_strs": True}
    )
    found = said.json()
    assert found["tokens"] == text.encode("héllo") and found["count"] == len(found["tokens"])
    assert len(found["token_strs"]) == found["count"] and found["max_model_len"] == 512
    messages = [{"role": "user", "content": "hi"}]
    chat = requests.post(f"{url}/tokenize", json={"model": "tiny", "messages": messages}).json()
    assert chat["tokens"] == text.encode(text.chat(messages), special=False)
    back = requests.post(f"{url}/detokenize", json={"model": "tiny", "tokens": chat["tokens"]}).json()
    assert back == {"prompt": text.tokenizer.decode(chat["tokens"], skip_special_tokens=False)}
    bad = requests.post(f"{url}/detokenize", json={"model": "tiny", "tokens": [2**40]})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "tokens[0]"
    both = requests.post(f"{url}/tokenize", json={"model": "tiny", "prompt": "a", "messages": messages})
    assert both.status_code == 400
    none = requests.post(f"{url}/tokenize", json={"model": "tiny", "messages": []})
    assert none.status_code == 400 and none.json()["error"]["param"] == "messages"
    for path, body in (("tokenize", {"prompt": "é" * 2**15}), ("detokenize", {"tokens": [1] * (2**15 + 1)})):
        long = requests.post(f"{url}/{path}", json={"model": "tiny", **body})
        assert long.status_code == 400 and "32768" in long.json()["error"]["message"]
    assert requests.get(f"{url}/version").json() == {"version": __version__}
    assert not triton.requests


def test_a_key_guards_every_route_but_health_metrics_and_version(start: Callable[..., Front]) -> None:
    url = start(api_keys=("k",)).url.removesuffix("/v1")
    for path in ("/tokenize", "/detokenize", "/v1/responses", "/v1/chat/completions", "/nothing"):
        assert requests.post(f"{url}{path}", json={}).status_code == 401, path
    assert requests.get(f"{url}/version").status_code == 200
    assert requests.get(f"{url}/health").status_code in (200, 503)


@pytest.mark.parametrize("kind", ["message", "reasoning"])
def test_the_work_for_an_item_grows_with_the_turn_before_it(kind: str) -> None:
    """16 MB in 16,000 items took 14 s: each was added to a copy of all before it."""
    made, total, copied = Messages(), 300, 0
    for at in range(total):
        if kind == "message":
            made.add(InputMessage(type=kind, role="assistant", content="xy"), f"input[{at}]")
        else:
            text = ReasoningText(type="reasoning_text", text="xy")
            made.add(InputReasoning(type=kind, content=[text]), f"input[{at}]")
        copied += sum(len(text) for name, text in made.messages[0].items() if text and name != "role")
    made.end_turn()
    (turn,) = made.messages
    assert turn["content" if kind == "message" else "reasoning_content"] == "xy" * total
    assert copied <= 2 * total


def test_what_a_stream_repeats_of_its_request_is_written_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the event loop: 60,000 names of metadata held all streams up."""
    body = {"model": "m", "input": "a", "metadata": {f"n{i}": "x" for i in range(5000)}}
    request = parse(ResponsesRequest, json.dumps(body).encode())
    choice = ResponseChoice([5], Expected())
    reply = ResponseReply(ServedModel("m", 64, "identity", None, 1), request, choice)
    encode, written = ENCODER.encode, 0

    def counted(value: object) -> str:
        nonlocal written
        text = encode(value)
        written += len(text)
        return text

    monkeypatch.setattr(ENCODER, "encode", counted)
    last = Piece("b", [8], finish_reason="stop", metrics=Metrics(1, 0.0))
    said = reply.event([], {}) + reply.event(choice.chunks(last), {}) + reply.ending(True)
    events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: ")]
    whole = json.loads(reply.text())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [e["type"] for e in events if "response" in e] == [
        "response.created", "response.in_progress", "response.completed"
    ]  # fmt: skip
    assert events[-1]["response"] == whole and whole["metadata"] == body["metadata"]
    assert (
        json.loads(reply.failed(ApiError(503, "lost")).splitlines()[1][6:])["response"]["status"] == "failed"
    )
    assert written < 20_000
