"""Tool calls as models write them, read while they are written.

Two spellings, told apart by their first characters, so that no option has to name the model's:
    <function=NAME><parameter=KEY>VALUE</parameter>...</function>     Qwen3.5, Qwen3-Coder, Nemotron-3
    {"name": NAME, "arguments": {...}}                                Hermes: Qwen3 and most others
A reader takes any pieces of the text. What it gives out depends on the text alone, never on where it was cut.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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


class CallPart(NamedTuple):
    """A call's name, in its first part, or more of its arguments' JSON."""

    name: str
    arguments: str


class XmlCall:
    """What follows `<function=`. An argument that is a string by its schema streams; others come whole."""

    def __init__(self, tools: Mapping[str, Schema]) -> None:
        self._tools = tools
        self._text = ""
        self._name: str | None = None
        self._key: str | None = None  # of the argument being read
        self._types: frozenset[str] = frozenset()
        self._num_arguments = 0
        self._begun = False  # the leading newline of a value is behind
        self.ended = False
        self.rest = ""  # what came behind the end

    @property
    def is_call(self) -> bool:
        return self._name is not None

    @property
    def said(self) -> str:
        """While it is no call."""
        return "<function=" + self._text

    def push(self, text: str) -> list[CallPart]:
        self._text += text
        return list(self._read())

    def finish(self, cut: bool) -> list[CallPart]:
        """No more text comes. cut: in the middle, so that the JSON stays open; else it is closed."""
        if cut or self._name is None:
            return []
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
        name, found, after = self._text.partition(">")
        if found:
            self._name, self._text = name.strip(), after
            yield CallPart(self._name, "")

    def _read_tag(self) -> Iterator[CallPart]:
        """Between arguments; what is no tag there is dropped."""
        at = self._text.find("<")
        self._text = self._text[at:] if at >= 0 else ""
        if self._text.startswith("<parameter="):
            key, found, after = self._text.removeprefix("<parameter=").partition(">")
            if found:
                self._key, self._text, self._begun = key.strip(), after, False
                self._types = types_of(self._tools.get(self._name or "", {}), self._key)
                self._num_arguments += 1
                opening = "{" if self._num_arguments == 1 else ", "
                yield CallPart("", f"{opening}{quoted(self._key)}: " + ('"' if self._streams else ""))
        elif self._text.startswith(("</function>", "</tool_call>")):
            self.rest = self._text.removeprefix("</function>")
            self.ended = True
            yield self._close()
        elif self._text and not may_begin(self._text, ("<parameter=", "</function>", "</tool_call>")):
            self._text = self._text[1:]

    @property
    def _streams(self) -> bool:
        return self._types == {"string"}

    def _read_value(self) -> Iterator[CallPart]:
        end = self._text.find("</parameter>")
        if end >= 0:
            value, self._text = self._text[:end], self._text[end + len("</parameter>") :]
            yield from self._end_value(value.removesuffix("\n"))
        elif self._streams and self._text:
            final_len = len(self._text) - held_back(self._text, ("\n</parameter>", "</parameter>"))
            if not self._begun and self._text.startswith("\n"):
                final_len = max(final_len, 1)
            if final_len:
                value, self._text = self._text[:final_len], self._text[final_len:]
                yield CallPart("", quoted(self._trimmed(value))[1:-1])

    def _end_value(self, value: str) -> Iterator[CallPart]:
        value = self._trimmed(value)
        yield CallPart("", quoted(value)[1:] if self._streams else typed(value, self._types))
        self._key = None

    def _trimmed(self, value: str) -> str:
        if not self._begun and value:
            self._begun = True
            return value.removeprefix("\n")
        return value

    def _close(self) -> CallPart:
        return CallPart("", "}" if self._num_arguments else "{}")


class JsonCall:
    """What begins with `{`. Arguments behind the name leave as they are written; in other orders, whole."""

    def __init__(self) -> None:
        self.said = ""  # all of it, in case that it is no call
        self._depth = 0
        self._in_string = self._escaped = False
        self._start: int | None = None  # where the arguments begin that leave as they are written,
        self._sent_len = 0
        self._end: int | None = None  # and where they end
        self.is_call = self.ended = False
        self.rest = ""  # what came behind the end

    def push(self, text: str) -> list[CallPart]:
        calls: list[CallPart] = []
        for at, char in enumerate(text):
            self._scan(char)
            if self._depth == 2 and char == "{" and not self._in_string and not self.is_call:
                calls += self._begin()
            self.said += char
            if self._depth == 1 and char == "}" and not self._in_string and self._start is not None:
                self._end = self._end or len(self.said)
            if self._depth == 0:
                self.ended, self.rest = True, text[at + 1 :]
                break
        if self._start is not None:
            calls.append(CallPart("", self.said[self._sent_len : self._end]))
            self._sent_len = len(self.said) if self._end is None else self._end
        elif self.ended:
            calls += self._whole()
        return calls

    def finish(self, cut: bool) -> list[CallPart]:
        """cut: in the middle; if its name is there, it is a call whose arguments are open."""
        found = NAMED.match(self.said) if cut and not self.is_call else None
        name = found and unquoted(found[1])
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

    def _begin(self) -> Iterator[CallPart]:
        found = HEAD.fullmatch(self.said)
        name = found and unquoted(found[1])
        if name:
            self.is_call = True
            self._start = self._sent_len = len(self.said)
            yield CallPart(name, "")

    def _whole(self) -> Iterator[CallPart]:
        found = _from_json(self.said)
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(found, dict) or not isinstance(name, str) or not name:
            return
        arguments = found.get("arguments", found.get("parameters"))
        if isinstance(arguments, str):  # some models write the JSON as a string
            arguments = _from_json(arguments)
        self.is_call = True
        yield CallPart(name, json.dumps(arguments if isinstance(arguments, dict) else {}, ensure_ascii=False))


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
    for read in (_from_json, _from_python):
        found = read(value.strip())
        if found is not ... and _fits(found, types):
            if isinstance(found, float) and "number" not in types and types:
                found = int(found)
            return json.dumps(found, ensure_ascii=False)
    return quoted(value)


def _fits(found: object, types: frozenset[str]) -> bool:
    if not types:
        return isinstance(found, (dict, list, bool, int, float)) or found is None
    if isinstance(found, bool):
        return "boolean" in types
    if isinstance(found, float) and found.is_integer() and "integer" in types:
        return True
    return any(isinstance(found, JSON_TYPES.get(name, ())) for name in types - {"boolean"})


def _from_json(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return ...


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _from_python(text: str) -> object:
    """Models write True, None and {'a': 1} too."""
    if len(text) > 10_000:
        return ...
    try:
        found = ast.literal_eval(text)
        json.dumps(found, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ...
    return found


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def unquoted(text: str) -> str:
    """The content of a JSON string; "" if it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""


def may_begin(text: str, marks: Sequence[str]) -> bool:
    """Whether text is the beginning of one of the marks."""
    return any(mark.startswith(text) for mark in marks)


def held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of text with which one of the marks may begin."""
    longest = max(map(len, marks), default=1) - 1
    for length in range(min(len(text), longest), 0, -1):
        if may_begin(text[-length:], marks):
            return length
    return 0
