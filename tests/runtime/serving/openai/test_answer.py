"""Reasoning, content and tool calls of what models write, however the text is cut."""

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hemiola.runtime.api import Logprob, Metrics, Piece
from hemiola.runtime.serving.openai import calls
from hemiola.runtime.serving.openai import parts as json_parts
from hemiola.runtime.serving.openai.answer import AnswerPart, Expected, Splitter
from hemiola.runtime.serving.openai.calls import Marks
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.serving.openai.parts import ENCODER, in_parts
from hemiola.runtime.serving.openai.prompt import PromptScores
from hemiola.runtime.serving.openai.reply import ChatChoice, Reply, TextChoice
from hemiola.runtime.serving.openai.response_reply import ResponseChoice
from hemiola.runtime.text import Text

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": ["number", "null"]},
        "exact": {"type": "boolean"},
        "tags": {"anyOf": [{"type": "array"}, {"type": "string"}]},
        "unit": {"enum": ["C", "F"]},
        "any": {"$ref": "#/$defs/x"},
    },
}
TOOLS = {"weather": WEATHER, "now": {}}
MODEL = ServedModel("ids", 100, "0" * 64, None)
ONE_CALL = Expected(tools=TOOLS, one_call=True)
PLAIN, TOOL = Expected(), Expected(tools=TOOLS)
THOUGHT, THOUGHT_TOOL = Expected(thinking=True), Expected(thinking=True, tools=TOOLS)


def xml(*arguments: tuple[str, str], name: str = "weather", frame: bool = True) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    call = f"<function={name}>\n{inner}</function>"
    return f"<tool_call>\n{call}\n</tool_call>" if frame else call


def hermes(**call: object) -> str:
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def call(*arguments: object, name: str = "weather") -> tuple[str, object]:
    return name, dict(arguments)


UNICODE = '日本 👩‍👩‍👧 "q" \\n \t</p>'
# name: (what is expected, text, reasoning, content, calls)
CASES = {
    "content": (PLAIN, "\n\n two  lines\n\n", "", "\n\n two  lines\n\n", []),
    "empty": (PLAIN, "", "", "", []),
    "almost_a_thought": (PLAIN, " <thin ice", "", " <thin ice", []),
    "thought_of_its_own": (PLAIN, "\n<think>\nhm\n\n</think>\n\nyes\n", "hm\n\n", "yes\n", []),
    "thought_of_the_prompt": (THOUGHT, "hm\n </think>\nno </think>", "hm\n ", "no </think>", []),
    "thought_without_end": (THOUGHT, "hm </thin", "hm </thin", "", []),
    "thought_not_at_the_beginning": (PLAIN, "a <think>b</think>", "", "a <think>b</think>", []),
    "no_tools_no_calls": (PLAIN, xml(("city", "x")), "", xml(("city", "x")), []),
    "xml": (TOOL, xml(("city", "Paris")), "", "", [call(("city", "Paris"))]),
    "xml_without_arguments": (TOOL, xml(name="now"), "", "", [call(name="now")]),
    "xml_types": (
        TOOL,
        xml(("days", "3"), ("share", "null"), ("exact", "True"))
        + xml(("tags", "['a']"), ("unit", "C"), ("any", "{}")),
        "",
        "",
        [
            call(("days", 3), ("share", None), ("exact", True)),
            call(("tags", ["a"]), ("unit", "C"), ("any", {})),
        ],
    ),
    "xml_types_that_do_not_fit": (
        TOOL,
        xml(("days", "3.5"), ("share", "much"), ("exact", "1"), ("tags", "a, b"), ("unit", "5"), ("x", "5")),
        "",
        "",
        [
            call(
                ("days", "3.5"), ("share", "much"), ("exact", "1"), ("tags", "a, b"), ("unit", "5"),
                ("x", "5"),
            )
        ],
    ),
    "xml_whole_number": (TOOL, xml(("days", "3.0")), "", "", [call(("days", 3))]),
    "xml_string_keeps_its_form": (
        TOOL, xml(("city", " 5\n\n  x\n")), "", "", [call(("city", " 5\n\n  x\n"))],
    ),
    "xml_empty_string": (TOOL, xml(("city", "")), "", "", [call(("city", ""))]),
    "xml_unicode": (TOOL, xml(("city", UNICODE)), "", "", [call(("city", UNICODE))]),
    "xml_on_one_line": (
        TOOL,
        "<tool_call><function=weather><parameter=city>x</parameter></function></tool_call>",
        "",
        "",
        [call(("city", "x"))],
    ),
    "xml_unknown_tool": (TOOL, xml(("a", "1"), name="other"), "", "", [call(("a", "1"), name="other")]),
    "xml_without_frame": (TOOL, "Well.\n" + xml(frame=False, name="now"), "", "Well.", [call(name="now")]),
    "xml_frame_half_forgotten": (
        TOOL, xml(frame=False, name="now") + "\n</tool_call>\nso", "", "so", [call(name="now")],
    ),
    "xml_function_without_end": (
        TOOL,
        "<tool_call><function=weather><parameter=city>\nx\n</parameter></tool_call>",
        "",
        "",
        [call(("city", "x"))],
    ),
    "xml_ends_early": (
        TOOL, "<tool_call>\n<function=weather>\n<parameter=city>\nPar\n", "", "", [call(("city", "Par"))],
    ),
    "two_calls": (
        TOOL,
        "Both: \n" + xml(("city", "A")) + "\n" + xml(("city", "B")) + "\n",
        "",
        "Both:",
        [call(("city", "A")), call(("city", "B"))],
    ),
    "one_call_of_three": (
        ONE_CALL, "a " + xml(("city", "A")) + hermes(name="now") + xml(name="now") + " b", "", "a b",
        [call(("city", "A"))],
    ),
    "call_within_a_thought": (THOUGHT_TOOL, "hm\n" + xml(name="now"), "hm", "", [call(name="now")]),
    "thought_content_call": (
        THOUGHT_TOOL, "hm\n</think>\n\nI ask.\n\n" + xml(name="now"), "hm\n", "I ask.", [call(name="now")],
    ),
    "hermes": (
        TOOL,
        hermes(name="weather", arguments={"city": UNICODE + "</tool_call>}{", "n": {"a": [1, {}]}}),
        "",
        "",
        [call(("city", UNICODE + "</tool_call>}{"), ("n", {"a": [1, {}]}))],
    ),
    "hermes_other_order": (
        TOOL, hermes(arguments={"city": "x"}, id=1, name="weather"), "", "", [call(("city", "x"))],
    ),
    "hermes_more_keys": (TOOL, hermes(name="now", arguments={}, id={"a": "}"}), "", "", [call(name="now")]),
    "hermes_json_in_a_string": (
        TOOL, hermes(name="weather", arguments='{"city": "x"}'), "", "", [call(("city", "x"))],
    ),
    "hermes_without_arguments": (TOOL, hermes(name="now"), "", "", [call(name="now")]),
    "hermes_parameters": (
        TOOL, hermes(name="now", parameters={"a": 1}), "", "", [call(("a", 1), name="now")],
    ),
    "hermes_without_name": (
        TOOL, 'a \n<tool_call>{"a": 1}</tool_call>', "", 'a \n<tool_call>{"a": 1}</tool_call>', [],
    ),
    "hermes_that_is_no_json": (TOOL, "<tool_call>{a}</tool_call>", "", "<tool_call>{a}</tool_call>", []),
    "toolcall_list": (
        TOOL,
        '<TOOLCALL>[{"name": "now", "arguments": {}},'
        ' {"name": "weather", "arguments": {"city": "x"}}]</TOOLCALL>',
        "",
        "",
        [call(name="now"), call(("city", "x"))],
    ),
    "no_call_in_the_frame": (
        TOOL, "see <tool_call> and <function=x>", "", "see <tool_call> and <function=x>", [],
    ),
}  # fmt: skip


def answer(expected: Expected, pieces: list[str], cut: bool = False) -> tuple:
    """(reasoning, content, calls as JSON texts), checked for the order and form of the parts."""
    reader = Splitter(expected)
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish(cut)
    texts = {"reasoning": "", "content": ""}
    calls: list[list[str]] = []
    for part in parts:
        assert part.text or part.name, "an empty part"
        if part.kind != "call":
            texts[part.kind] += part.text
        elif part.name:
            assert part.call_id == len(calls)
            calls.append([part.name, part.text])
        else:
            assert part.call_id == len(calls) - 1
            calls[-1][1] += part.text
    assert reader.num_calls == len(calls)
    return texts["reasoning"], texts["content"], [tuple(one) for one in calls]


def read(found: tuple) -> tuple:
    return *found[:2], [(name, json.loads(arguments)) for name, arguments in found[2]]


@pytest.mark.parametrize("properties", [{"a": {"anyOf": [{"type": "string"}] * 100}}, True, ["a"], None])
def test_each_argument_of_an_answer_walks_all_branches_of_its_schema(
    monkeypatch: pytest.MonkeyPatch, properties: object
) -> None:
    """8,000 branches took 10 ms of the event loop at each argument."""
    walked: list[object] = []
    plain = calls._types
    monkeypatch.setattr(calls, "_types", lambda schema: walked.append(schema) or plain(schema))
    splitter = Splitter(Expected(tools={"f": {"properties": properties}}))
    text = xml(*[("a", "1")] * 20, ("b", "1"), name="f") * 5
    parts = splitter.push(text) + splitter.finish(cut=False)
    assert splitter.num_calls == 5 and '{"a": "1", "b": "1"}' in "".join(part.text for part in parts)
    assert len(walked) == (101 if isinstance(properties, dict) else 0)


@pytest.mark.parametrize("case", CASES)
def test_answer_is_split_the_same_however_it_comes(case: str) -> None:
    expected, text, *wanted = CASES[case]
    whole = answer(expected, [text])
    assert read(whole) == tuple(wanted)
    assert answer(expected, list(text)) == whole
    for at in range(1, len(text)):
        assert answer(expected, [text[:at], text[at:]]) == whole, (text[:at], text[at:])
    rng = random.Random(case)
    for _ in range(50):
        edges = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 12)))
        pieces = [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)], strict=True)]
        assert answer(expected, pieces) == whole, pieces


@pytest.mark.parametrize("case", [case for case, (_, text, *_) in CASES.items() if text])
def test_answer_cut_anywhere_is_the_same_however_it_comes(case: str) -> None:
    """max_tokens ends it: its calls may be open, but what it says may not depend on the pieces."""
    expected, text, *_ = CASES[case]
    for end in range(1, len(text)):
        assert answer(expected, list(text[:end]), cut=True) == answer(expected, [text[:end]], cut=True)


FORCED = {  # thought, and texts of calls: pieces up to where each name is known
    "qwen3.5": ("", ["<tool_call>\n<function=weather>", "\n<parameter=city>\nx\n</parameter>\n</function>"]),
    "nemotron-3": ("hm <tool_call> {\n</think>\n", ["<tool_call><function=now>", "\n</function>"]),
    "hermes": ("", ['<tool_call>\n{"name": "now"', ', "arguments": {"a": {}}}']),
}
END = "\n</tool_call>"


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("case", FORCED)
def test_a_cut_call_is_no_content(case: str, forced: bool) -> None:
    """Nor is the beginning of the next; where calls are forced, a part of a mark neither."""
    thought, (head, rest) = FORCED[case]
    if thought and not forced:
        thought = "hm\n</think>\n"
    expected = Expected(thinking=bool(thought), tools=TOOLS, forced=forced)
    text = thought + (head + rest + END) * 2
    named = [at + len(head) for at in (len(thought), len(text) - len(head + rest + END))]
    for end in range(1, len(text)):
        reasoning, content, calls = whole = answer(expected, [text[:end]], cut=True)
        assert answer(expected, list(text[:end]), cut=True) == whole
        assert content == "" or (not forced and "<tool_call>".startswith(content)), text[:end]
        assert len(calls) == sum(end >= at for at in named), text[:end]
        assert thought.startswith(reasoning)
    assert content == "" and calls[0][1] and (not thought or reasoning == thought.partition("</think>")[0])


def test_a_string_argument_streams_and_others_come_whole() -> None:
    reader = Splitter(TOOL)
    reader.push("<tool_call>\n<function=weather>\n<parameter=city>\nPar")
    assert reader.push("is\nand ") == [AnswerPart("call", "is\\nand ")]
    reader.push("L\n</parameter>\n<parameter=days>\n1")
    assert reader.push("2") == []
    assert reader.push("\n</parameter>")[0].text == "12"


def test_content_is_not_held_back_without_need() -> None:
    reader = Splitter(TOOL)
    assert reader.push("one") == [AnswerPart("content", "one")]
    assert reader.push(" <") == []
    assert reader.push(" two") == [AnswerPart("content", " < two")]


def strictly(text: str) -> object:
    """As the strictest parsers read JSON."""

    def number(digits: str) -> float:
        assert math.isfinite(float(digits)), digits
        return float(digits)

    def constant(name: str) -> None:
        raise AssertionError(name)

    def pairs(found: list[tuple[str, object]]) -> dict[str, object]:
        assert len(dict(found)) == len(found), "a name twice"
        return dict(found)

    found = json.loads(
        text, parse_int=number, parse_float=number, parse_constant=constant, object_pairs_hook=pairs
    )
    json.dumps(found, ensure_ascii=False).encode()  # no lone surrogates
    assert max(itertools.accumulate((c in "[{") - (c in "]}") for c in re.sub(STRING, "", text))) <= 65
    return found


STRING = r'"(?:[^"\\]|\\.)*"'
DEEP = "[" * 90 + "]" * 90
NO_JSON = {  # a value: what an argument of any type has of it, what an object of JSON has
    "1e999": ("1e999", "1e999"),
    "-1e999": ("-1e999", "-1e999"),
    "NaN": ("NaN", "NaN"),
    "-Infinity": ("-Infinity", "-Infinity"),
    "9" * 400: ("9" * 400, "9" * 400),
    "9" * 5000: ("9" * 5000, "9" * 5000),
    "-0": (0, 0),
    "01": ("01", "01"),
    '"\\ud800"': ("\ufffd", "\ufffd"),
    '"\\ud83d\\ude00 \\ude00"': ("😀 \ufffd", "😀 \ufffd"),
    '{"a": 1, "a": 2}': ({"a": 2}, {"a": 1}),
    "{1: 2, '1': 3}": ({"1": 3}, {}),
    "[1e999]": ("[1e999]", ["1e999"]),
    DEEP: (DEEP, ...),
    '"a\nb\x01"': ("a\nb\x01", "a\nb\x01"),
    '"\\x \\u12"': ("\\x \\u12", "\\x \\u12"),
    "True": (True, "True"),
    "": ("", ...),
}


@pytest.mark.parametrize("value", NO_JSON, ids=lambda value: repr(value[:20]))
def test_arguments_are_json_that_every_parser_takes(value: str) -> None:
    """`<parameter=x>1e999` was {"x": Infinity}."""
    spelled, written = NO_JSON[value]
    text = xml(("any", value))
    whole = answer(TOOL, [text])
    if not value.startswith('"'):  # ast reads some of these strings as Python has them
        assert strictly(whole[2][0][1]) == {"any": spelled}
    strictly(whole[2][0][1])
    assert answer(TOOL, list(text)) == whole
    text = f'<tool_call>{{"name": "weather", "arguments": {{"a": "b", "any": {value}}}}}</tool_call>'
    whole = answer(TOOL, [text])
    found = strictly(whole[2][0][1])
    assert found["a"] == "b" and (written is ... or found["any"] == written)
    assert answer(TOOL, list(text)) == whole


@pytest.mark.parametrize("end", range(1, 90))
def test_a_call_of_json_that_ends_early_is_closed(end: int) -> None:
    said = '"city": "P\\u00e9 \\ud83d\\ude00 \\n", "n": [1.5, true, {"x": null, "y": [ ] } , "z" ], "l": -1 }'
    text = '<tool_call>{"name": "weather", "arguments": {' + said[:end]
    assert answer(TOOL, list(text)) == answer(TOOL, [text])
    strictly(answer(TOOL, [text])[2][0][1])


@pytest.mark.parametrize(
    "text", ["<tool_call><function=></function></tool_call>", "<tool_call><function= >\n<a>"]
)
def test_a_call_without_a_name_is_content(text: str) -> None:
    """Its parts belonged to a call that nobody had announced."""
    assert answer(TOOL, [text]) == ("", text, []) == answer(TOOL, list(text))


def test_the_first_of_two_arguments_of_a_name_counts() -> None:
    text = xml(("city", "a"), ("city", "b"), ("days", "1"), ("days", "2"))
    assert read(answer(TOOL, [text]))[2] == [call(("city", "a"), ("days", 1))]


LONG = 40_000
LENGTHY = {
    "json_name": (TOOL, '<tool_call>{"name": "' + "x" * LONG + '", ' + '"a": {}, ' * 5000 + "}"),
    "json_objects": (TOOL, "<tool_call>{" + '"a": {"b": {}}, ' * 3000),
    "json_arguments": (TOOL, hermes(name="weather", arguments={"city": "x" * LONG})),
    "xml_name": (TOOL, "<tool_call><function=" + "x" * LONG),
    "xml_parameter": (TOOL, "<tool_call><function=weather><parameter=" + "x" * LONG),
    "xml_string": (TOOL, xml(("city", "<" * LONG))),
    "xml_value": (TOOL, xml(("tags", "<" * LONG))),
    "xml_between": (TOOL, "<tool_call><function=weather>" + "<" * LONG),
    "white": (TOOL, "a" + "\n" * LONG + "b"),
    "white_first": (PLAIN, " " * LONG + "<think>"),
    "white_thought": (THOUGHT_TOOL, "a" + " " * LONG + "b</think>" + "\n" * LONG),
    "white_between_calls": (TOOL, "<tool_call>" + ",[ " * LONG),
    "marks": (TOOL, "<tool_cal" * (LONG // 9)),
    "calls": (TOOL, xml(name="now") * 800),
}  # fmt: skip


@pytest.mark.parametrize("width", [1, 10**9])
@pytest.mark.parametrize("case", LENGTHY)
def test_the_work_for_a_character_does_not_grow_with_the_answer(
    case: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of 40,000 characters took 12 s: it was read again at each `{`."""
    expected, text = LENGTHY[case]
    looked = 0

    def count(owner: type, name: str, size: Callable[..., int]) -> None:
        plain = getattr(owner, name)

        def counted(*args: object) -> object:
            nonlocal looked
            looked += size(*args)
            return plain(*args)

        monkeypatch.setattr(owner, name, counted)

    count(Splitter, "_read", lambda splitter: len(splitter._text))
    count(Splitter, "_until", lambda splitter, kind: len(splitter._text))
    count(calls.XmlCall, "_read", lambda one: len(one._text))
    count(calls.Awaited, "push", lambda one, text: len(one._end) + len(text))
    count(calls.JsonCall, "_scan", lambda one, char: 1)
    count(calls.JsonCall, "_begin", lambda one, said: len(said))
    answer(expected, [text[at : at + width] for at in range(0, len(text), width)])
    assert looked <= 40 * len(text)


class CountedText(str):
    """Counts how often somebody looks at it."""

    num_looks = 0

    def _looked(self, plain: Callable[..., Any], *args: Any) -> Any:
        CountedText.num_looks += 1
        return plain(self, *args)

    def __getitem__(self, at: Any) -> str:
        return self._looked(str.__getitem__, at)

    def __len__(self) -> int:
        return self._looked(str.__len__)

    def __lt__(self, other: str) -> bool:
        return self._looked(str.__lt__, other)

    def startswith(self, *args: Any) -> bool:
        return self._looked(str.startswith, *args)


def test_the_work_for_a_piece_does_not_grow_with_the_tools() -> None:
    """Each tool's name was looked at for each piece."""
    marks = Marks([CountedText(f"<function=tool_{i}>") for i in range(4000)])
    for text, held in {
        "x": 0,
        "a < b": 0,
        "x<function=tool_39": 17,
        "<function=tool_4001": 0,
        "x<": 1,
    }.items():
        CountedText.num_looks = 0
        assert marks.held_back(text) == held
        assert CountedText.num_looks < 50, text


def test_the_work_for_a_piece_does_not_grow_with_the_items_before_it() -> None:
    """All items of a response were looked at for each piece."""
    looked = 0

    class Counted(list):
        def __iter__(self) -> Iterator[Any]:
            nonlocal looked
            looked += len(self)
            return super().__iter__()

    choice = ResponseChoice([5], Expected(tools={"now": {}}))
    choice.items = Counted()
    for _ in range(200):
        choice.take(Piece('<tool_call>{"name": "now", "arguments": {}}</tool_call>', [7, 7]))
    assert len(choice.items) == 200 and looked <= 200


def test_the_work_for_a_usage_does_not_grow_with_the_choices() -> None:
    """With continuous_usage_stats each chunk of each of 1,024 choices added all of them up."""
    ids, scores = [5, 6], PromptScores(MODEL, [5, 6], None)
    choices: list[Any] = [TextChoice(i, ids, None, False, "", scores) for i in range(64)]
    reply = Reply("text_completion", MODEL, choices, 32)
    last = Piece("b", [8], finish_reason="stop", metrics=Metrics(2, 0.0, cached_tokens=1))
    for index in range(64):
        for piece in (Piece("a", [7, 7]), last):
            reply.count(index, piece)
    choices.clear()
    assert reply.usage() == {
        "prompt_tokens": 4,
        "completion_tokens": 3 * 64,
        "total_tokens": 3 * 64 + 4,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


SOUP = (
    "<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<function=weather>", "<function=now>",
    "</function>", "<parameter=city>", "<parameter=days>", "</parameter>", "<think>", "</think>", "{", "}",
    "[", '{"name": "now"', ', "arguments": ', '"arguments"', '"name"', "]", '"', "\\", ",", ":", "\n", " ",
    "<", ">", "1", "é", "😀", "a", "null",
    "<function=", "<parameter=any>", "1e999", "-", "NaN", '"a": ', "\\u", "\\ud83d", "ude00", "\x01", "True",
    "'",
)  # fmt: skip


@settings(max_examples=4 * settings().max_examples)
@given(
    st.sampled_from([PLAIN, TOOL, THOUGHT, THOUGHT_TOOL]),
    st.lists(st.sampled_from(SOUP), max_size=25).map("".join),
    st.randoms(),
    st.booleans(),
)
def test_any_soup_of_marks_is_read_the_same_however_it_comes(
    expected: Expected, text: str, rng: random.Random, cut: bool
) -> None:
    whole = answer(expected, [text], cut)
    assert answer(expected, list(text), cut) == whole
    if not cut:
        assert all(isinstance(strictly(arguments), dict) for _, arguments in whole[2])
    edges = sorted(rng.choices(range(len(text) + 1), k=4))
    assert answer(expected, [text[a:b] for a, b in itertools.pairwise([0, *edges, len(text)])], cut) == whole


class Counting:
    """An encoder that says how much each call writes."""

    def __init__(self, plain: json.JSONEncoder) -> None:
        self._plain, self.lens = plain, [0]

    def encode(self, value: object) -> str:
        made = self._plain.encode(value)
        self.lens.append(len(made))
        return made


@pytest.mark.parametrize("kind", ["text_completion", "chat.completion"])
def test_an_answers_log_probabilities_are_written_by_one_call(
    monkeypatch: pytest.MonkeyPatch, text: Text, kind: str
) -> None:
    """Which holds Python's lock: all streams of the API stood still for 0.1 s for 4,000 tokens."""
    model = ServedModel("tiny", 100, "0" * 64, text)
    prompt, num = [5] * 300, 1000
    scores = PromptScores(model, prompt, 2, 2)
    if kind == "text_completion":
        choice: Any = TextChoice(0, prompt, model.tokens, True, "", scores)
    else:
        choice = ChatChoice(0, prompt, model.tokens, True, Expected(), scores)
    best = Logprob(7, -1.0, tuple((i, -1.5) for i in range(20)))
    of_prompt = [None, *[best] * 299]
    choice.take(Piece("a", [7] * num, [best] * num, "length", prompt_logprobs=of_prompt))
    reply = Reply(kind, model, [choice], 1, scores)
    counting = Counting(json_parts.ENCODER)
    monkeypatch.setattr(json_parts, "ENCODER", counting)
    told = reply.text()
    assert max(counting.lens) < len(told) / 10, (max(counting.lens), len(told))
    answer = json.loads(told)
    (found,) = answer["choices"]
    assert len(found["token_ids"]) == num and found["prompt_token_ids"] == prompt
    assert len((answer | found)["prompt_logprobs"]) == 300


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
        max_leaves=40,
    )
)
def test_what_is_written_in_parts_differs_from_what_is_written_whole(value: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_parts, "AT_ONCE", 2)
        assert in_parts(value) == ENCODER.encode(value)
