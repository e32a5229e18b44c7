"""An error as tritonserver carries it: `[KIND] ` and a text. HTTP answers 400 to all, and gRPC has no status.

The text is the sentence. For a caller that asks for `error_data` it is JSON, from which `error_from` makes
the same error again: a Refused with its code and its field, a Busy with its seconds.
"""

import json
from collections.abc import Callable
from typing import Any

from hemiola.runtime.errors import ABSENT, CODES, Busy, Cancelled, Failed, Lost, Name, Refused

INTERNAL = "INTERNAL"
KINDS: dict[type[Exception], str] = {
    Refused: "INVALID_ARG",
    Busy: "OVERLOADED",
    Failed: "UNAVAILABLE",
    Cancelled: "CANCELLED",
    Lost: "UNAVAILABLE",  # of a server that ends: as data, for it may be asked again when it is back
}
NAMED = {kind: error for error, kind in KINDS.items() if error is not Lost}


def kind_of(error: BaseException) -> str:
    return next((kind for one, kind in KINDS.items() if isinstance(error, one)), INTERNAL)


def text_of(error: BaseException, as_data: bool) -> str:
    if kind_of(error) == INTERNAL:
        return f"{type(error).__name__}: {error}"
    return json.dumps(_data(error)) if as_data else str(error)


def kind_and_text(error: BaseException, as_data: bool) -> tuple[str, str]:
    """Of any error, also one that cannot be written: its caller must get an answer."""
    try:
        return kind_of(error), text_of(error, as_data)
    except Exception as failed:
        return INTERNAL, f"{type(error).__name__} cannot be written as text ({type(failed).__name__})"


def error_from(text: str, lost: Callable[[str], Lost] = Lost) -> Exception:
    """What a server says. Without a kind of ours it is tritonserver's own word: it has no engine to ask.

    lost: makes the error then, from that word.
    """
    kind, _, content = text.removeprefix("[").partition("] ")
    if kind == INTERNAL:
        return RuntimeError(text)
    if kind not in NAMED:
        return lost(text)
    try:
        return _made(NAMED[kind], json.loads(content))
    except (ValueError, TypeError, KeyError, AttributeError):  # the sentence alone, or another version's JSON
        return Refused("other", message=content) if kind == KINDS[Refused] else NAMED[kind](content)


def _data(error: BaseException) -> dict[str, Any]:
    match error:
        case Refused():
            parts = [part if isinstance(part, str) else _name(part) for part in error.parts]
            return {"code": error.code, "field": error.field, "said": parts}
        case Busy():
            numbers = ("retry_after_s", "max_rows", "max_queue")
            return {"said": str(error)} | {name: getattr(error, name) for name in numbers}
        case _:
            return {"said": str(error), "lost": isinstance(error, Lost)}


def _name(name: Name) -> dict[str, object]:
    value = {} if name.value is ABSENT else {"value": name.value}
    return {"field": name.field, **value}


def _made(kind: type[Exception], data: dict[str, Any]) -> Exception:
    if kind is Refused:
        message = tuple(part if isinstance(part, str) else Name(**part) for part in data["said"])
        return Refused(data["code"] if data["code"] in CODES else "other", data["field"], message=message)
    if kind is Busy:
        return Busy(data.pop("said"), **data)
    return Lost(data["said"]) if data.get("lost") else kind(data["said"])
