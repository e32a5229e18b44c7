"""How much a JSON text holds, before anybody reads it.

Whoever reads it holds every stream up meanwhile: 16 MB of empty objects took pydantic a minute.
"""

import re

from hemiola.runtime.errors import Refused

MOST_VALUES = 2**20  # ids of a prompt among them; about 0.5 us each
MOST_NAMES = 2**16  # and objects and lists; about 10 us each
MUCH = (2**18, 2**15, 2**12)  # bytes, values, names: more would hold Python's lock for milliseconds
MAX_BRACKETS = 2**10  # of a request to tritonserver, whose values are flat
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def check_size(what: str, text: bytes | bytearray) -> None:
    if len(text) < MOST_NAMES or max(_count(text)) < MOST_NAMES:
        return
    num_strings = (text.count(b'"') - text.count(b'\\"')) // 2  # few enough to be cut out in a moment
    num_values, num_names = (num_strings, 0)
    if num_strings <= MOST_VALUES + MOST_NAMES:
        num_values, num_names = _count(STRING.sub(b"", text))
    for count, limit, kind in (
        (num_values, MOST_VALUES, "values"),
        (num_names, MOST_NAMES, "objects, lists and names"),
    ):
        if count > limit:
            message = f"{what} holds {count} {kind}, the limit is {limit}"
            raise Refused("too_long", message=message, way_out="send less")


def is_dear(text: bytes | bytearray) -> bool:
    """Whether another process should read it (aside.py)."""
    most_bytes, most_values, most_names = MUCH
    if len(text) <= most_names or len(text) > most_bytes:
        return len(text) > most_bytes
    num_values, num_names = _count(text)
    return num_values > most_values or num_names > most_names


def check_brackets(what: str, text: bytes | bytearray) -> None:
    """Of a body for tritonserver, which takes no nested values and whose parser recurses once for each."""
    if text.count(b"[") + text.count(b"{") <= MAX_BRACKETS:
        return
    outside = STRING.sub(b"", text)
    count = outside.count(b"[") + outside.count(b"{")
    if count > MAX_BRACKETS:
        message = f"{what} holds {count} lists and objects, the limit is {MAX_BRACKETS}"
        raise Refused("too_long", message=message, way_out="send less")


def _count(text: bytes | bytearray) -> tuple[int, int]:
    return text.count(b",") + 1, text.count(b"{") + text.count(b"[") + text.count(b":")
