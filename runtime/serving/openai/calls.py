"""Tool calls as models write them, read while they are written.

Two spellings, told apart by their first characters, so that no option has to name the model's:
    <function=NAME><parameter=KEY>VALUE</parameter>...</function>     Qwen3.5, Qwen3-Coder, Nemotron-3
    {"name": NAME, "arguments": {...}}                                Hermes: Qwen3 and most others
A reader takes any pieces of the text. What it gives out depends on the text alone, never on where it was cut.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hemiola.runtime.serving.openai.strict import (
    StrictObject,
    characters,
    from_json,
    from_python,
    quoted,
    to_json,
    unquoted,
)

Schema = Mapping[str, Any]
NAME = r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")'
NAMED = re.compile(NAME)
HEAD = re.compile(NAME + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*')
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}


class Marks:
    """Texts with which something begins or ends. A request with thousands of tools has thousands."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted(texts)
        self._firsts = {text[0] for text in self._texts}
        self._longest = max(map(len, self._texts), default=1)
        self.pattern = re.compile("|".join(map(re.escape, self._texts)) or "(?!)")  # any of them

    def __bool__(self) -> bool:
        return bool(self._texts)

    def held_back(self, text: str) -> int:
        """Length of the longest end of a text with which one of them may begin."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts and self._may_begin(text[at:]):
                return len(text) - at
        return 0

    def _may_begin(self, text: str) -> bool:
        at = bisect_left(self._texts, text)
        return at < len(self._texts) and self._texts[at].startswith(text)


VALUE_ENDS = Marks(["\n</parameter>", "</parameter>"])


class CallPart(NamedTuple):
    """A call's name, in its first part, or more of its arguments' JSON."""

    name: str
    arguments: str


class Awaited:
    """Text that is of use only when a mark stands in it. Each character is looked at once, or little more."""

    def __init__(self, mark: str) -> None:
        self._pieces: list[str] = []
        self._mark = mark
        self._end = ""  # the mark may have begun

    def push(self, text: str) -> bool:
        """Whether the mark is there now."""
        self._pieces.append(text)
        seen = self._end + text
        self._end = seen[max(0, len(seen) - len(self._mark) + 1) :]
        return self._mark in seen

    @property
    def text(self) -> str:
        return "".join(self._pieces)


class XmlCall:
    """What follows `<function=`. An argument that is a string by its schema streams; others come whole.

    Of two arguments of one name the first counts: it may have left already.
    """

    def __init__(self, tools: Mapping[str, Schema], types: dict[tuple[str, str], frozenset[str]]) -> None:
        """types: of arguments, by names of tool and argument, as far as an answer's calls have read them."""
        self._tools = tools
        self._types_of = types
        self._text = ""
        self._awaited: Awaited | None = None  # holds the text while nothing else can be read
        self._name: str | None = None
        self._key: str | None = None  # of the argument being read
        self._types: frozenset[str] = frozenset()
        self._keys: set[str] = set()
        self._drops = False  # the argument being read
        self._begun = False  # the leading newline of a value is behind
        self.ended = False
        self.rest = ""  # what came behind the end

    @property
    def is_call(self) -> bool:
        return bool(self._name)

    @property
    def said(self) -> str:
        """While it is no call."""
        return "<function=" + (self._awaited.text if self._awaited is not None else self._text)

    def push(self, text: str) -> list[CallPart]:
        if self._awaited is None:
            self._text += text
        elif self._awaited.push(text):
            self._text, self._awaited = self._awaited.text, None
        else:
            return []
        return list(self._read())

    def finish(self, cut: bool) -> list[CallPart]:
        """No more text comes. cut: in the middle, so that the JSON stays open; else it is closed."""
        if cut or not self.is_call:
            return []
        if self._awaited is not None:
            self._text = self._awaited.text
        calls = [] if self._key is None else list(self._end_value(self._text.removesuffix("\n")))
        return [*calls, self._close()]

    def _read(self) -> Iterator[CallPart]:
        while not self.ended:
            before = (self._text, self._key, self._name)
            if self._name is None:
                yield from self._read_name()
            elif self._key is None:
                yield from self._read_tag()
            else:
                yield from self._read_value()
            if before == (self._text, self._key, self._name):
                return

    def _read_name(self) -> Iterator[CallPart]:
        name, bracket, after = self._text.partition(">")
        if not bracket:
            self._await(">")
        elif name.strip():
            self._name, self._text = name.strip(), after
            yield CallPart(self._name, "")
        else:
            self._text, self.rest, self.ended = name + bracket, after, True

    def _await(self, mark: str) -> None:
        self._awaited = Awaited(mark)
        self._awaited.push(self._text)

    def _read_tag(self) -> Iterator[CallPart]:
        """Between arguments; what is no tag there is dropped."""
        at = self._text.find("<")
        self._text = self._text[at:] if at >= 0 else ""
        if self._text.startswith("<parameter="):
            key, bracket, after = self._text.removeprefix("<parameter=").partition(">")
            if not bracket:
                self._await(">")
                return
            self._key, self._text, self._begun = key.strip(), after, False
            self._types = self._read_types(self._name or "", self._key)
            self._drops = self._key in self._keys
            if not self._drops:
                self._keys.add(self._key)
                opening = "{" if len(self._keys) == 1 else ", "
                yield CallPart("", f"{opening}{quoted(self._key)}: " + ('"' if self._streams else ""))
        elif self._text.startswith(("</function>", "</tool_call>")):
            self.rest = self._text.removeprefix("</function>")
            self.ended = True
            yield self._close()
        elif self._text and not may_begin(self._text, ("<parameter=", "</function>", "</tool_call>")):
            self._text = self._text[1:]

    def _read_types(self, name: str, key: str) -> frozenset[str]:
        """Once: a schema may have thousands of branches, and an answer thousands of arguments."""
        schema = self._tools.get(name, {})
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or key not in properties:
            return types_of({}, key)  # nothing is kept of a name that the model made up
        if (name, key) not in self._types_of:
            self._types_of[name, key] = types_of(schema, key)
        return self._types_of[name, key]

    @property
    def _streams(self) -> bool:
        return self._types == {"string"} and not self._drops

    def _read_value(self) -> Iterator[CallPart]:
        end = self._text.find("</parameter>")
        if end >= 0:
            value, self._text = self._text[:end], self._text[end + len("</parameter>") :]
            yield from self._end_value(value.removesuffix("\n"))
        elif not self._streams:
            self._await("</parameter>")
        elif self._text:
            final_len = len(self._text) - VALUE_ENDS.held_back(self._text)
            if not self._begun and self._text.startswith("\n"):
                final_len = max(final_len, 1)
            if final_len:
                value, self._text = self._text[:final_len], self._text[final_len:]
                yield CallPart("", quoted(self._trimmed(value))[1:-1])

    def _end_value(self, value: str) -> Iterator[CallPart]:
        value = self._trimmed(value)
        if not self._drops:
            yield CallPart("", quoted(value)[1:] if self._streams else typed(value, self._types))
        self._key = None

    def _trimmed(self, value: str) -> str:
        if not self._begun and value:
            self._begun = True
            return value.removeprefix("\n")
        return value

    def _close(self) -> CallPart:
        return CallPart("", "}" if self._keys else "{}")


class JsonCall:
    """What begins with `{`. Arguments behind the name leave as they are written; in other orders, whole."""

    def __init__(self) -> None:
        self._pieces: list[str] = []  # all of it, while it is no call
        self._depth = 0
        self._in_string = self._escaped = False
        self._sought = False  # a name before the first object within
        self._arguments: StrictObject | None = None  # being read
        self.is_call = self.ended = False
        self.rest = ""  # what came behind the end

    @property
    def said(self) -> str:
        """While it is no call."""
        return "".join(self._pieces)

    def push(self, text: str) -> list[CallPart]:
        calls: list[CallPart] = []
        arguments: list[str] = []
        for at, char in enumerate(text):
            self._scan(char)
            if self._depth == 2 and char == "{" and not self._in_string and not self._sought:
                calls += self._begin(self.said + text[:at])
            if self._arguments is not None:
                arguments.append(self._arguments.push(char))
                if self._depth == 1:
                    arguments.append(self._arguments.close())
                    self._arguments = None
            if self._depth == 0:
                self.ended, text, self.rest = True, text[: at + 1], text[at + 1 :]
                break
        if arguments:
            calls.append(CallPart("", "".join(arguments)))
        if not self.is_call:
            self._pieces.append(text)
            calls += self._whole() if self.ended else ()
        return calls

    def finish(self, cut: bool) -> list[CallPart]:
        """cut: in the middle; if its name is there, it is a call whose arguments are open."""
        if self._arguments is not None and not cut:
            return [CallPart("", self._arguments.close())]
        match = NAMED.match(self.said) if cut and not self.is_call else None
        name = match and unquoted(match[1])
        self.is_call = self.is_call or bool(name)
        return [CallPart(name, "")] if name else []

    def _scan(self, char: str) -> None:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _begin(self, said: str) -> Iterator[CallPart]:
        self._sought = True
        match = HEAD.fullmatch(said)
        name = match and unquoted(match[1])
        if name:
            self.is_call, self._arguments = True, StrictObject()
            yield CallPart(name, "")

    def _whole(self) -> Iterator[CallPart]:
        call = from_json(self.said)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(name, str) or not name:
            return
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):  # some models write the JSON as a string
            arguments = from_json(arguments)
        self.is_call = True
        yield CallPart(characters(name), to_json(arguments if isinstance(arguments, dict) else {}))


def types_of(tool: Schema, key: str) -> frozenset[str]:
    """JSON types that a tool's schema allows for an argument; empty if it does not say."""
    properties = tool.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(schema) if isinstance(schema, Mapping) else frozenset({"string"})


def _types(schema: Schema) -> frozenset[str]:
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(name for name in given if isinstance(name, str))
    for choice in ("anyOf", "oneOf"):
        if isinstance(schema.get(choice), list):
            each = [_types(one) for one in schema[choice] if isinstance(one, Mapping)]
            return frozenset().union(*each) if all(each) else frozenset()
    values = schema.get("enum")
    if not isinstance(values, list):
        values = [schema["const"]] if "const" in schema else []
    if values and all(isinstance(value, str) for value in values):
        return frozenset({"string"})
    return frozenset()


def typed(value: str, types: frozenset[str]) -> str:
    """A value's JSON: as its schema says where it can be read so, else as a string."""
    for read in (from_json, from_python):
        parsed = read(value.strip())
        if parsed is not ... and _fits(parsed, types):
            if isinstance(parsed, float) and "number" not in types and types:
                parsed = int(parsed)
            return to_json(parsed)
    return quoted(value)


def _fits(value: object, types: frozenset[str]) -> bool:
    if not types:
        return isinstance(value, (dict, list, bool, int, float)) or value is None
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return any(isinstance(value, JSON_TYPES.get(name, ())) for name in types - {"boolean"})


def may_begin(text: str, marks: Sequence[str]) -> bool:
    """Whether text is the beginning of one of the marks."""
    return any(mark.startswith(text) for mark in marks)
