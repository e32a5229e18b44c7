"""What a model says, split into reasoning, content and tool calls while it is being said."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hemiola.runtime.serving.openai.calls import CallPart, JsonCall, Marks, Schema, XmlCall, may_begin

THINK, THINK_END = "<think>", "</think>"
OPENINGS = {"<tool_call>": "</tool_call>", "<TOOLCALL>": "</TOOLCALL>"}  # the second: Nemotron Nano 2
BLOCK = 1024  # characters
BETWEEN = " \t\r\n,[]"  # calls: Nemotron Nano 2 writes a list
Where = Literal["start", "reasoning", "content", "calls", "call"]


class AnswerPart(NamedTuple):
    """Of the answer; `call_id` counts tool calls; a call's first part has its name."""

    kind: Literal["reasoning", "content", "call"]
    text: str  # of a call: its arguments
    call_id: int = 0
    name: str = ""


@dataclass(frozen=True)
class Expected:
    """What an answer may hold besides content."""

    thinking: bool = False  # the prompt ends within a thought
    may_think: bool = True  # a thought at the beginning is reasoning
    opens_thoughts: bool = True  # and a grammar lets the model begin one
    tools: Mapping[str, Schema] | None = None  # parameters by name; None: a call is content
    one_call: bool = False  # later ones are dropped
    forced: bool = False  # behind its thought it is calls, by a grammar, and nothing else
    json: bool = False  # behind its thought it is JSON or calls, by a grammar


class Splitter:
    """Takes the text in any pieces; the parts, joined, depend on the text alone.

    A thought is given out as it is, line breaks at its end included: a template that puts it back then writes
    what was said, and the prefix cache finds it. Those behind it, and white space before a call, are dropped.
    """

    def __init__(self, expected: Expected) -> None:
        self._tools = expected.tools
        self._text = ""
        self._white: list[str] = []  # what is white before the text, and of use only if no mark follows
        self._where: Where = "start" if expected.may_think else "content"
        if expected.thinking:
            self._where = "reasoning"
        self._trims = expected.thinking  # line breaks before the next character are dropped
        self._opened = self._closing = ""  # around calls; the first only until a call was read
        self._call: XmlCall | JsonCall | None = None
        self._types: dict[tuple[str, str], frozenset[str]] = {}  # of arguments
        self._one_call = expected.one_call
        self._forced = expected.forced
        self._drops = False  # the call that is being read
        self._may_be_json = expected.json  # the content, which has not begun
        self.num_calls = 0
        named = [f"<function={name}>" for name in expected.tools or ()]  # Qwen3-Coder may forget the frame
        openings = [*OPENINGS, *named] if expected.tools is not None else []
        # By its grammar, a thought has to end.
        ends = [] if expected.forced or expected.json else openings
        self._marks = {"reasoning": Marks([THINK_END, *ends]), "content": Marks(openings)}

    def push(self, text: str) -> list[AnswerPart]:
        """In blocks: each mark that is found moves what is behind it."""
        return self._given(self._read_blocks(text))

    def _read_blocks(self, text: str) -> Iterator[AnswerPart]:
        for at in range(0, len(text), BLOCK):
            self._text += text[at : at + BLOCK]
            yield from self._read()

    def finish(self, cut: bool) -> list[AnswerPart]:
        """No more text comes. cut: because of its length."""
        return self._given(self._finish(cut))

    def _given(self, parts: Iterator[AnswerPart]) -> list[AnswerPart]:
        """Where calls are forced, what is no call is how one is spelled: a cut may leave its beginning."""
        return _joined(part for part in parts if part.kind != "content" or not self._forced)

    def _read(self) -> Iterator[AnswerPart]:
        while True:
            before = (self._where, self._text)
            match self._where:
                case "start":
                    self._start()
                case "reasoning" | "content":
                    yield from self._until(self._where)
                case "calls":
                    yield from self._between_calls()
                case "call":
                    yield from self._within_call()
            if before == (self._where, self._text):
                return

    def _start(self) -> None:
        self._set_aside(None)
        if self._text.startswith(THINK):
            self._text = self._text.removeprefix(THINK)
            self._where, self._trims, self._white = "reasoning", True, []
        elif self._text and not may_begin(self._text, [THINK]):
            self._where = "content"

    def _set_aside(self, white: str | None) -> None:
        text = self._text.lstrip(white)
        self._white.append(self._text[: len(self._text) - len(text)])
        self._text = text

    def _until(self, kind: Literal["reasoning", "content"]) -> Iterator[AnswerPart]:
        if self._trims:
            self._text = self._text.lstrip("\n")
            self._trims = not self._text
        if kind == "content" and self._may_be_json and self._text:
            self._may_be_json = False
            if not self._text.startswith("<"):  # what it quotes is no call
                self._marks["content"] = Marks([])
        marks = self._marks[kind]
        mark = marks.pattern.search(self._text)
        final_len = mark.start() if mark else len(self._text) - marks.held_back(self._text)
        text, self._text = self._text[:final_len], self._text[final_len:]
        # What is white before a mark is no part of the text, but for the end of a thought.
        keeps_all = not marks or (mark is not None and mark[0] == THINK_END)
        kept = text if keeps_all else text.rstrip()
        if kept or keeps_all:
            yield AnswerPart(kind, "".join([*self._white, kept]))
            self._white = []
        self._white.append(text[len(kept) :])
        if mark:
            white, self._white = "".join(self._white), []
            self._text = self._text[len(mark[0]) :]
            self._leave_for(mark[0], white)

    def _leave_for(self, mark: str, white: str) -> None:
        if mark == THINK_END:
            self._where, self._trims = "content", True
        elif mark in OPENINGS:
            self._where, self._opened, self._closing = "calls", white + mark, OPENINGS[mark]
        else:
            self._where, self._opened, self._closing = "calls", white, "</tool_call>"
            self._text = mark + self._text

    def _between_calls(self) -> Iterator[AnswerPart]:
        self._set_aside(BETWEEN)
        text = self._text
        if text.startswith(self._closing):
            self._text = text.removeprefix(self._closing)
            self._where, self._trims, self._white = "content", True, []
        elif text.startswith("{"):
            self._where, self._call, self._white = "call", JsonCall(), []
        elif text.startswith("<function="):
            self._text = text.removeprefix("<function=")
            self._where, self._call, self._white = "call", XmlCall(self._tools or {}, self._types), []
        elif text and not may_begin(text, [self._closing, "<function="]):
            yield AnswerPart("content", self._opened)  # no call follows: it was meant as text
            self._text, self._white = "".join([*self._white, text]), []
            self._where = "content"

    def _within_call(self) -> Iterator[AnswerPart]:
        assert self._call is not None
        calls, self._text = self._call.push(self._text), ""
        yield from self._numbered(calls)
        if self._call.ended:
            yield from self._end_call(self._call)

    def _numbered(self, calls: list[CallPart]) -> Iterator[AnswerPart]:
        for call in calls:
            if call.name:
                self._drops = self._one_call and self.num_calls > 0
                self.num_calls += not self._drops
            if not self._drops:
                yield AnswerPart("call", call.arguments, self.num_calls - 1, call.name)

    def _end_call(self, call: XmlCall | JsonCall) -> Iterator[AnswerPart]:
        if not call.is_call:
            yield AnswerPart("content", self._opened + call.said)
        self._text, self._call, self._opened = call.rest, None, ""
        self._where = "calls" if call.is_call else "content"

    def _finish(self, cut: bool) -> Iterator[AnswerPart]:
        if self._call is not None:
            yield from self._numbered(self._call.finish(cut))
            if not (self._call.is_call or cut):  # a cut one may have become a call
                yield AnswerPart("content", self._opened + self._call.said)
        elif self._where == "calls":
            yield AnswerPart("content", "" if cut else self._opened)
        elif self._where == "reasoning" or self._text.strip() or not self.num_calls:
            kind = "reasoning" if self._where == "reasoning" else "content"
            yield AnswerPart(kind, "".join([*self._white, self._text]))
        self._text, self._white = "", []


def _joined(parts: Iterator[AnswerPart]) -> list[AnswerPart]:
    """Without empty ones; neighbours of a kind as one."""
    joined: list[list[AnswerPart]] = []
    for part in parts:
        last = joined[-1][0] if joined else None
        if last and not part.name and (last.kind, last.call_id) == (part.kind, part.call_id):
            joined[-1].append(part)
        elif part.text or part.name:
            joined.append([part])
    return [each[0]._replace(text="".join(part.text for part in each)) for each in joined]
