"""What an answer must be: which texts the grammars of forced calls and response formats take."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from hemiola.runtime.api import StructuredOutputsParams
from hemiola.runtime.choose.grammar import to_lark
from hemiola.runtime.serving.openai.answer import Expected
from hemiola.runtime.serving.openai.guide import guide
from hemiola.runtime.serving.openai.schema import ChatRequest, parse

PARAMETERS = {
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "$defs": {"city": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "x\\n</tool_call>"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LOOSE = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
THOUGHT = 'hm {"a": 1} <tool_call>\n</think>\n\n'
OBJECT, TEXT = '{"a": 1}', "Hello."
REQUIRED = {"tools": TOOLS, "tool_choice": "required"}
ONE = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}}
ANY = {"response_format": {"type": "json_object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}
PLAIN, MAY = Expected(opens_thoughts=False), Expected()
THINKING = Expected(thinking=True)
TOOL = Expected(opens_thoughts=False, tools={"weather": PARAMETERS, "now": {}})
# name: (options, what the answer may hold, texts that fit, texts that do not)
CASES = {
    "required": (
        REQUIRED, TOOL, [WEATHER, NOW, f"{NOW}\n{WEATHER}"],
        [TEXT, LOOSE, THOUGHT + NOW, WEATHER.replace("x", "\t")],
    ),
    "required_one_at_a_time": (REQUIRED | {"parallel_tool_calls": False}, TOOL, [NOW], [f"{NOW}\n{NOW}"]),
    "required_in_a_thought": (REQUIRED, THINKING, [THOUGHT + NOW], [NOW, THOUGHT + TEXT]),
    "required_perhaps_after_a_thought": (REQUIRED, MAY, [NOW, f"<think>{THOUGHT}{NOW}"], [THOUGHT + NOW]),
    "named": (ONE, TOOL, [NOW], [WEATHER, f"{NOW}\n{NOW}", NOW.replace("{}", '{"a": 1}')]),
    "object": (ANY, PLAIN, [OBJECT, "{}"], [TEXT, "[]", "{ }"]),
    "object_in_a_thought": (ANY, THINKING, [THOUGHT + OBJECT], [OBJECT, THOUGHT + TEXT]),
    "schema": (FORMAT, PLAIN, [OBJECT, '{"a": 1, "b": [2]}'], [TEXT, "{}", '{"a": "x"}', '{"a":  1}']),
    "schema_or_a_call": (FORMAT | {"tools": TOOLS}, TOOL, [OBJECT, NOW, LOOSE], [TEXT, '{"a": "x"}']),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(text: object) -> LLTokenizer:
    return LLTokenizer(text.tokenizer.to_str(), eos_token=0)


@pytest.mark.parametrize("case", CASES)
def test_texts_that_an_answer_may_be(tokenizer: LLTokenizer, text: object, case: str) -> None:
    options, expected, fit, others = CASES[case]
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **options}
    structured = guide(parse(ChatRequest, json.dumps(body).encode()), expected)
    source = to_lark(StructuredOutputsParams(**structured))
    for answer in (*fit, *others):
        matcher = LLMatcher(tokenizer, source, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = text.encode_words(answer)
        whole = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert whole == (answer in fit), answer


def test_an_answer_without_wishes_is_free() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}'
    assert guide(parse(ChatRequest, body), THINKING) is None
