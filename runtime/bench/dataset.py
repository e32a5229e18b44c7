"""Prompts from a file: JSON lines (or one JSON list) of prompts, chats or ShareGPT conversations."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hemiola.runtime.bench.workloads import Turn, Turns
from hemiola.runtime.errors import Refused
from hemiola.runtime.json_file import parse_json

FORMS = ("prompt", "messages", "conversations")
EXAMPLE = 'write {"prompt": "TEXT", "max_tokens": 64}, {"messages": [...]} or {"conversations": [...]}'
HUMAN, ANSWER = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard", "model")


class Reader(Protocol):
    """What an LLM knows of text."""

    def encode(self, prompt: str | Sequence[int]) -> list[int]: ...

    def chat_text(self, messages: Sequence[Mapping[str, object]]) -> str: ...


class _Asked(NamedTuple):
    prompt: str | list[int]
    answer: str | None  # what the file holds for it: only its length is used


def read_entries(path: Path, count: int | None) -> list[tuple[str, object]]:
    """The first `count` entries (None: all) and their places. Lines after them are not looked at."""
    entries = list(islice(_entries(path), count))
    if not entries:
        message = f"{path} holds no requests"
        raise Refused("out_of_range", "num_requests", message=message, way_out=f"{EXAMPLE}, one per line")
    if count is not None and len(entries) < count:
        message = f"{path} holds {len(entries)} requests, --num-requests is {count}"
        raise Refused("out_of_range", "num_requests", message=message, way_out="lower it or add lines")
    return entries


def read_sessions(entries: Sequence[tuple[str, object]], max_tokens: int, reader: Reader) -> list[Turns]:
    """One request each."""
    return [[_turn(where, entry, max_tokens, reader)] for where, entry in entries]


def refuse_too_many(entries: Sequence[tuple[str, object]], max_len: int) -> None:
    """Numbers of tokens that no answer could have."""
    for where, entry in entries:
        asked = entry.get("max_tokens") if isinstance(entry, dict) else None
        if isinstance(asked, int) and asked > max_len:
            message = f"{where}: max_tokens is {_shown(asked)}, the engine runs with max_len={max_len}"
            raise Refused("too_long", "max_tokens", message=message, way_out="lower it")


def _entries(path: Path) -> Iterator[tuple[str, object]]:
    """(place, value) of every entry."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8 at byte {error.start}"
        raise Refused("malformed", message=message, way_out="convert it") from None
    except OSError as error:
        reason = f"{error.strerror}; --workload takes random, multi-turn or a file of JSON lines"
        raise Refused("not_found", "workload", message=f"cannot read {path}: {reason}") from None
    if text.lstrip().startswith("["):
        for index, entry in enumerate(_parse(text, str(path))):
            yield f"{path}[{index}]", entry
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def _parse(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}" if "\n" in text else f"column {error.colno}"
        message = f"{where} is not JSON at {at} ({error.msg}): {_shown(text)}"
        raise Refused("malformed", message=message, way_out=f"{EXAMPLE}") from None
    except ValueError as error:
        message = f"{where} cannot be read as JSON ({error}): {_shown(text)}"
        raise Refused("malformed", message=message, way_out=f"{EXAMPLE}") from None


def _turn(where: str, entry: object, max_tokens: int, reader: Reader) -> Turn:
    if not isinstance(entry, dict):
        raise Refused(
            "wrong_type", message=f"{where} is {_shown(entry)}, not an object", way_out=f"{EXAMPLE}"
        )
    forms = [form for form in FORMS if form in entry]
    if len(forms) != 1:
        present = " and ".join(forms) or "none of prompt, messages and conversations"
        raise Refused("conflict", message=f"{where} has {present}: {_shown(entry)}", way_out=f"{EXAMPLE}")
    asked = _READERS[forms[0]](where, entry[forms[0]], reader)
    try:
        ids = reader.encode(asked.prompt)
        if asked.answer:
            max_tokens = max(1, len(reader.encode(asked.answer)))
    except Refused as error:
        raise error.at(where) from None
    if not ids:
        message = f"{where}: {forms[0]} is {_shown(entry[forms[0]])}, no tokens"
        raise Refused("out_of_range", forms[0], message=message, way_out="give it text or remove the line")
    if "max_tokens" in entry:
        max_tokens = _checked_max_tokens(where, entry["max_tokens"])
    return Turn(ids, max_tokens, 0.0, where)


def _checked_max_tokens(where: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        message = f"{where}: max_tokens is {_shown(value)}, it must be an integer of at least 1"
        raise Refused("out_of_range", "max_tokens", message=message, way_out="correct it")
    return value


def _read_prompt(where: str, value: object, reader: Reader) -> _Asked:
    if isinstance(value, str):
        return _Asked(value, None)
    if isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return _Asked(value, None)
    message = f"{where}: prompt is {_shown(value)}"
    raise Refused("wrong_type", "prompt", message=message, way_out="give text or a list of token ids")


def _read_messages(where: str, value: object, reader: Reader) -> _Asked:
    """Everything up to the last answer, which is what the engine is asked for."""
    messages = _objects(where, "messages", value, ("role", "content"))
    answer = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    if not messages:
        message = f"{where}: messages holds an answer only: {_shown(value)}"
        raise Refused("missing", "messages", message=message, way_out="add what was asked")
    try:
        return _Asked(reader.chat_text(messages), answer if isinstance(answer, str) else None)
    except Refused as error:
        raise error.at(where) from None


def _read_conversation(where: str, value: object, reader: Reader) -> _Asked:
    """The first thing that the human said, as plain text, and the answer to it."""
    turns = _objects(where, "conversations", value, ("from", "value"))
    for index, item in enumerate(turns):
        if item["from"] in HUMAN:
            after = turns[index + 1] if index + 1 < len(turns) else {"from": "", "value": ""}
            return _Asked(str(item["value"]), str(after["value"]) if after["from"] in ANSWER else None)
    message = f"{where}: conversations has nothing from a human: {_shown(value)}"
    raise Refused("missing", "conversations", message=message, way_out="add it or remove the line")


_READERS: dict[str, Callable[[str, object, Reader], _Asked]] = {
    "prompt": _read_prompt,
    "messages": _read_messages,
    "conversations": _read_conversation,
}


def _objects(where: str, name: str, value: object, keys: tuple[str, str]) -> list[dict[str, object]]:
    """A list of objects with these keys. A message's content may be what the template makes of it."""
    if not isinstance(value, list) or not value:
        message, way_out = f"{where}: {name} is {_shown(value)}", f'{{"{keys[0]}": ..., "{keys[1]}": ...}}'
        raise Refused("wrong_type", name, message=message, way_out=f"give a list of {way_out}")
    for item in value:
        wrong = not isinstance(item, dict) or not isinstance(item.get(keys[0]), str) or keys[1] not in item
        if wrong or (keys[1] == "value" and not isinstance(item["value"], str)):
            message = f"{where}: {name} holds {_shown(item)}"
            way_out = f'{{"{keys[0]}": "...", "{keys[1]}": "..."}}'
            raise Refused("wrong_type", name, message=message, way_out=f"write {way_out}")
    return list(value)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = repr(text) if isinstance(value, str) else text
    return text if len(text) <= 60 else f"{text[:57]}..."
