"""JSON of long lists, written part by part: each call holds Python's lock, for which all streams wait."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

ENCODER = json.JSONEncoder(separators=(",", ":"))  # ASCII: some clients break lines at U+2028
AT_ONCE = 64  # of a list's values
Value = TypeVar("Value")


def listed(make: Callable[[Value], Any], values: Sequence[Value]) -> list[Any] | Iterator[Any]:
    """What is made of each; of many only when `in_parts` writes them: a garbage collection that finds a
    million of them takes as long as writing them at once."""
    made = map(make, values)
    return list(made) if len(values) <= AT_ONCE else made


def has_many(choice: dict[str, Any]) -> bool:
    """Whether a chunk's choice has lists that are better written in parts: most have none at all."""
    scores = choice.get("logprobs") or {}
    lists = [choice.get("prompt_logprobs"), *scores.values()]
    return any(isinstance(one, Iterator) or (isinstance(one, list) and len(one) > AT_ONCE) for one in lists)


def in_parts(value: object) -> str:
    """JSON. The log-probabilities of an answer of 16,000 tokens took 0.5 s as a whole."""
    return "".join(parts_of(value))


def parts_of(value: object) -> Iterator[str]:
    """The same, to be joined once."""
    if isinstance(value, dict):
        opening = "{"
        for name, member in value.items():
            yield f"{opening}{ENCODER.encode(name)}:"
            yield from parts_of(member)
            opening = ","
        yield "}" if value else "{}"
    elif isinstance(value, Iterator) or (isinstance(value, list) and len(value) > AT_ONCE):
        values, opening = iter(value), "["
        while part := list(islice(values, AT_ONCE)):
            yield f"{opening}{ENCODER.encode(part)[1:-1]}"
            opening = ","
        yield "]" if opening == "," else "[]"
    else:
        yield ENCODER.encode(value)
