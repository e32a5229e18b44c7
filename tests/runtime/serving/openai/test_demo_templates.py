"""Bundled checkpoints show tools, calls and results to the model, in the form in which answers are read."""

import json
from pathlib import Path

import pytest

from hemiola.runtime.serving.openai.answer import Expected, Splitter
from hemiola.runtime.serving.openai.chat import render
from hemiola.runtime.serving.openai.guide import guide
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.serving.openai.schema import ChatRequest, parse
from hemiola.runtime.text import Text

DEMO = Path(__file__).parents[4] / "demo"
TYPES = {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": TYPES}}}
ARGUMENTS = {"city": "Kyōto\n<b>", "days": 3, "tags": ["a", None]}
CALL = {"name": "weather", "arguments": json.dumps(ARGUMENTS)}
ANSWER = {
    "role": "assistant", "content": "I ask.", "reasoning_content": "hm\n",
    "tool_calls": [
        {"id": str(n), "type": "function", "function": CALL}
        for n in range(2)
    ],
}  # fmt: skip
RESULTS = [{"role": "tool", "content": f"sun {n}", "tool_call_id": str(n)} for n in range(2)]


def prompt_of(name: str, messages: list[dict], **options: object) -> str:
    return rendered(Text(DEMO / name), messages, **options)[0]


def rendered(text: Text, messages: list[dict], **options: object) -> tuple[str, dict | None]:
    """The prompt, and what its answer must be."""
    model = ServedModel("demo", 4096, "0123456789abcdef", text, 1)
    request = parse(ChatRequest, json.dumps({"model": "demo", "messages": messages, **options}).encode())
    prompt, expected = render(model, request)
    return prompt, guide(request, expected)


@pytest.mark.parametrize("name", ["nemotron-h-code", "qwen3.5-code"])
def test_what_the_template_writes_is_read_as_it_was(name: str) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        ANSWER,
        *RESULTS,
    ]
    prompt = prompt_of(name, messages, tools=[TOOL])
    assert "Be brief." in prompt and '"weather"' in prompt and "sun 0" in prompt and "sun 1" in prompt
    said = prompt.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    splitter = Splitter(Expected(tools={"weather": TOOL["function"]["parameters"]}))
    parts = [*splitter.push(said), *splitter.finish(cut=False)]
    assert "".join(part.text for part in parts if part.kind == "reasoning").strip() == "hm"
    assert "".join(part.text for part in parts if part.kind == "content") == "I ask."
    for call_id in range(2):
        call = [part for part in parts if part.kind == "call" and part.call_id == call_id]
        assert call[0].name == "weather"
        assert json.loads("".join(part.text for part in call)) == ARGUMENTS


@pytest.mark.parametrize("name", ["nemotron-h-code", "qwen3.5-code"])
def test_plain_prompts_are_those_of_the_training(name: str) -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"},
                {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]  # fmt: skip
    plain = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert prompt_of(name, messages) == plain + "<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["nemotron-h-code", "qwen3.5-code"])
def test_transformers_finds_the_one_template_and_renders_the_same(name: str) -> None:
    from transformers import AutoTokenizer

    assert "chat_template" not in json.loads((DEMO / name / "tokenizer_config.json").read_text())
    messages = [{"role": "user", "content": "hi"}, ANSWER, *RESULTS, {"role": "user", "content": "and?"}]
    theirs = AutoTokenizer.from_pretrained(DEMO / name)
    calls = [one | {"function": CALL | {"arguments": ARGUMENTS}} for one in ANSWER["tool_calls"]]
    given = [messages[0], ANSWER | {"tool_calls": calls}, *messages[2:]]
    for tools in (None, [TOOL]):
        wanted = theirs.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=True)
        assert prompt_of(name, messages, tools=tools) == wanted


OBJECT = {"response_format": {"type": "json_object"}}
FORCED = {"tools": [TOOL], "tool_choice": "required"}


@pytest.mark.parametrize("wanted", [OBJECT, FORCED, FORCED | OBJECT], ids=["object", "call", "both"])
def test_a_model_that_does_not_think_begins_no_thought_instead_of_its_call(wanted: dict) -> None:
    """It would never end it. A template says nothing about this: it shows the thoughts of others, too."""

    def may_begin_one(text: Text) -> bool:
        assert "<think>" in text.template
        return "<think>" in json.dumps(rendered(text, [{"role": "user", "content": "hi"}], **wanted)[1])

    text, closed = Text(DEMO / "qwen3.5-code"), Text(DEMO / "qwen3.5-code")
    assert not may_begin_one(text)
    text.tokenizer.add_tokens(["<think>"])
    assert may_begin_one(text)
    closed.tokenizer.add_tokens(["<think>"])
    closed.template += "<think>\n\n</think>\n\n"  # as with enable_thinking false
    assert not may_begin_one(closed)
