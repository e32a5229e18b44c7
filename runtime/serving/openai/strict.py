"""JSON that every parser takes, made of what models write: no NaN, no number beyond a double's, no lone
surrogate, no name twice, no deep nesting."""

import ast
import json
import math
import re

MAX_DEPTH = 64  # of objects and lists; strict parsers stop at 128
SPACE = " \t\r\n"
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
HEX = "[0-9a-fA-F]"
ESCAPE = re.compile(
    rf'\\(["\\/bfnrt]|u(?![dD][89a-fA-F]){HEX}{{4}}|u[dD][89abAB]{HEX}{{2}}\\u[dD][c-fC-F]{HEX}{{2}})'
)
ESCAPE_BEGUN = re.compile(rf"\\(u({HEX}{{0,3}}|[dD][89abAB]{HEX}{{2}}(\\(u([dD]([c-fC-F]{HEX}?)?)?)?)?))?")
SURROGATE = re.compile(rf"\\u[dD][89a-fA-F]{HEX}{{2}}")


def quoted(text: str) -> str:
    """A JSON string. What is no character becomes U+FFFD."""
    return json.dumps(characters(text), ensure_ascii=False)


def unquoted(text: str) -> str:
    """The content of a JSON string; "" if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return characters(value) if isinstance(value, str) else ""


def from_json(text: str) -> object:
    """`...` where it is no JSON."""
    try:
        value = json.loads(
            text, parse_constant=_no_number, parse_float=_finite, parse_int=_finite, object_pairs_hook=_dict
        )
    except (ValueError, RecursionError):
        return ...
    return ... if _is_deep(value, MAX_DEPTH) else value


def from_python(text: str) -> object:
    """Models write True, None and {'a': 1} too."""
    if len(text) > 10_000:
        return ...
    try:
        return from_json(json.dumps(ast.literal_eval(text), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ...


def to_json(value: object) -> str:
    """Of what `from_json` has read."""
    return characters(json.dumps(value, ensure_ascii=False))


def characters(text: str) -> str:
    """A text without lone surrogates."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float | int:
    if not math.isfinite(float(text)):
        raise ValueError("beyond a double's range")
    return float(text) if set(text) & set(".eE") else int(text)


def _dict(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Names that are the same once they are characters are one."""
    return {characters(name): value for name, value in pairs}


def _is_deep(value: object, left: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    values = value.values() if isinstance(value, dict) else value
    return left == 0 or any(_is_deep(value, left - 1) for value in values)


class StrictObject:
    """A JSON object while it is written. What is JSON passes as it is; numbers, words and names come whole.

    A word that is no JSON becomes a string. Behind anything else that is none, nothing passes any more, and
    `close` ends what is open.
    """

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._names: list[set[str]] = []  # of the objects and lists that are open
        self._expected = "value"  # or: first, first name, name, colon, next
        self._inside = ""  # or: string, name, word
        self._kept: list[str] = []  # of the name or word
        self._escape = ""  # begun in a string
        self._comma: list[str] = []  # and white space behind it: it passes with what follows
        self._broken = False

    def push(self, char: str) -> str:
        if self._broken:
            return ""
        if self._inside in ("string", "name"):
            return self._in_string(char)
        if self._inside == "word":
            if char not in SPACE + ',:[]{}"':
                self._kept.append(char)
                return ""
            return self._end_word() + self._between(char)
        return self._between(char)

    def close(self) -> str:
        """What makes it whole."""
        end = ""
        if self._inside == "string":
            end = '"'
        elif self._inside == "word":
            end = self._end_word()
        elif self._expected == "colon":
            end = ": null"
        elif self._expected == "value" and self._closers[-1:] == ["}"]:
            end = "null"
        return end + "".join(reversed(self._closers))

    def _between(self, char: str) -> str:
        if char in SPACE:
            if self._comma:
                self._comma.append(char)
            return "" if self._comma else char
        takes_value = self._expected in ("value", "first")
        if char == '"' and self._expected in ("first name", "name"):
            self._inside, self._kept = "name", []
        elif char == '"' and takes_value:
            self._inside = "string"
            return self._after_comma('"')
        elif char in "{[" and takes_value and len(self._closers) < MAX_DEPTH:
            self._closers.append("}" if char == "{" else "]")
            self._names.append(set())
            made = self._after_comma(char)
            self._expected = "first name" if char == "{" else "first"
            return made
        elif self._closers[-1:] == [char] and (
            self._expected in ("first", "first name", "next") or self._comma
        ):
            self._closers.pop()
            self._names.pop()
            self._comma, self._expected, self._broken = [], "next", not self._closers
            return char
        elif char == ":" and self._expected == "colon":
            self._expected = "value"
            return char
        elif char == "," and self._expected == "next":
            self._comma, self._expected = [char], "name" if self._closers[-1] == "}" else "value"
        elif takes_value and char not in ",:[]{}":
            self._inside, self._kept = "word", [char]
        else:
            self._broken = True
        return ""

    def _after_comma(self, text: str) -> str:
        comma, self._comma = self._comma, []
        return "".join([*comma, text])

    def _end_word(self) -> str:
        word = "".join(self._kept)
        self._inside, self._expected = "", "next"
        number = NUMBER.fullmatch(word) is not None and math.isfinite(float(word))
        return self._after_comma(word if number or word in ("true", "false", "null") else quoted(word))

    def _in_string(self, char: str) -> str:
        tried = self._escape + char
        if tried == '"':
            return self._end_string()
        if not self._escape and char != "\\":
            return self._passed(quoted(char)[1:-1])
        self._escape = ""
        if ESCAPE.fullmatch(tried):
            return self._passed(tried)
        if ESCAPE_BEGUN.fullmatch(tried):
            self._escape = tried
            return ""
        alone = SURROGATE.match(tried)
        rest = tried[6:] if alone else tried[1:]
        return self._passed("\ufffd" if alone else "\\\\") + "".join(map(self._in_string, rest))

    def _passed(self, text: str) -> str:
        if self._inside == "string":
            return text
        self._kept.append(text)
        return ""

    def _end_string(self) -> str:
        inside, self._inside = self._inside, ""
        if inside == "string":
            self._expected = "next"
            return '"'
        name, self._kept = "".join(self._kept), []
        plain = unquoted(f'"{name}"')
        if plain in self._names[-1]:
            self._broken = True
            return ""
        self._names[-1].add(plain)
        self._expected = "colon"
        return self._after_comma(f'"{name}"')
