"""Text to ids and back: tokenizer, chat template, and text that grows token by token."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from hemiola.runtime.errors import Refused
from hemiola.runtime.json_file import read_json

BROKEN = "\ufffd"  # what an incomplete character decodes to
MARKS = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>"}
ROLES = {"system", "user", "assistant"}  # those that every template shows
LABELS = {"role", "content", "name", "tool_call_id", "reasoning_content"}  # good templates drop some of them
LONG_TEXT = 4096  # characters; shorter ones are encoded before another thread could wake
SHRINKS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1}  # characters that may become one
LOOK_BACK = 6  # tokens before the text, so that a decoder sees where a word begins


class Text:
    """An engine's tokenizer directory."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise Refused(f"{path} is missing; run build-engine again")
        try:
            self.tokenizer: Tokenizer = _read_tokenizer(path)
        except Exception as error:  # tokenizers raises bare Exception
            raise Refused(f"{path} is not a tokenizer ({error}); run build-engine again") from None
        config = folder / "tokenizer_config.json"
        found = read_json(config, "run build-engine again") if config.is_file() else {}
        if not isinstance(found, dict):
            raise Refused(f"{config} is no JSON object; run build-engine again")
        self.special = {name: text for name, text in map(_special, found.items()) if text is not None}
        template = folder / "chat_template.jinja"
        try:
            self.template = template.read_text(encoding="utf-8") if template.is_file() else None
        except UnicodeDecodeError as error:
            raise Refused(f"{template} is not UTF-8 ({error}); run build-engine again") from None

    @cached_property
    def _most_characters(self) -> int | None:
        return most_characters(json.loads(self.tokenizer.to_str()))

    def encode(self, text: str, max_len: int | None = None) -> list[int]:
        """Ids of a text, special tokens included; a text that begins with a BOS gets no second one.

        What cannot fit into max_len tokens is refused unread: to read 60 MB takes minutes and gigabytes.
        """
        if max_len is not None and len(text) > max(max_len, LONG_TEXT):
            most = self._most_characters
            if most is not None and len(text) > (max_len + 1) * most:  # one: a second BOS
                raise Refused(
                    f"prompt is {len(text)} characters, and max_len={max_len} tokens have at most"
                    f" {most} each; shorten it"
                )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Refused(
                f"prompt is not valid Unicode at character {error.start} (a lone surrogate); remove it"
            ) from None
        if len(text) < LONG_TEXT:
            ids: list[int] = self.tokenizer.encode(text).ids
        else:  # while which other threads run
            ids = self.tokenizer.encode_batch_fast([text])[0].ids
        bos = self.special.get("bos_token")
        if bos is not None and ids[:2] == [self.tokenizer.token_to_id(bos)] * 2 and text.startswith(bos):
            return ids[1:]
        return ids

    def encode_words(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, object]], **variables: object) -> str:
        """The prompt for a conversation, up to where the assistant speaks; nothing it says vanishes."""
        if self.template is None:
            raise Refused(
                "the engine has no chat template; pass a prompt, or build from a checkpoint that has one"
            )
        if not all(
            isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
        ):
            raise Refused(
                "messages must have a role and a content each; pass [{'role': 'user', 'content': TEXT}]"
            )
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self.special, **variables}
        prompt = self._render(messages, given)
        for index, name in self._doubtful(messages):
            if prompt == self._without(messages, index, name, given):
                raise Refused(
                    f"messages[{index}].{name} changes nothing: the chat template does not show that of a"
                    f" message by {messages[index]['role']}; take it out"
                )
        return prompt

    def _doubtful(self, messages: Sequence[Mapping[str, object]]) -> Iterator[tuple[int, str]]:
        """Parts of messages that the template may not read, by index and name; each once for each role."""
        seen: set[tuple[object, str]] = set()
        for index, message in enumerate(messages):
            role = message["role"]
            for name, value in message.items():
                if (role, name) in seen or value in (None, "", [], {}):
                    continue
                seen.add((role, name))
                if name == "content":
                    doubtful = role not in ROLES and not self._mentions(str(role))
                else:
                    misplaced = name == "tool_calls" and role != "assistant"
                    doubtful = name not in LABELS and (misplaced or not self._mentions(name))
                if doubtful:
                    yield index, name

    def _mentions(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self.template or "") is not None

    def _without(
        self, messages: Sequence[Mapping[str, object]], index: int, name: str, given: Mapping[str, object]
    ) -> str | None:
        """The prompt without this part; None: the template cannot do without it."""
        less = {key: value for key, value in messages[index].items() if key != name}
        if name == "content":
            less["content"] = ""
        try:
            return self._render([*messages[:index], less, *messages[index + 1 :]], given)
        except Refused:
            return None

    def _render(self, messages: Sequence[Mapping[str, object]], given: Mapping[str, object]) -> str:
        try:
            return self._compiled.render(messages=messages, **given)
        except TemplateError as error:
            raise Refused(f"the chat template refuses these messages: {error}; change them") from None
        except (TypeError, KeyError, AttributeError, RecursionError, SyntaxError) as error:
            raise Refused(f"the chat template does not fit these messages ({error}); change them") from None

    @cached_property
    def variables(self) -> frozenset[str]:
        """What the chat template reads; it would ignore anything else."""
        environment = _environment()
        try:
            read = meta.find_undeclared_variables(environment.parse(self.template or ""))
        except TemplateError:
            return frozenset()  # chat says what is wrong with it
        return frozenset(read) - environment.globals.keys()

    @cached_property
    def _compiled(self) -> Template:
        return _environment().from_string(self.template or "")


def most_characters(content: Mapping[str, Any]) -> int | None:
    """That one token can stand for; None where a tokenizer may leave some of a text out.

    Known for bytes in a BPE (Qwen, Nemotron): each character of a text becomes one or more of its tokens'.
    NFC and NFKC make one of at most four: none that they write decomposes further.
    """
    model, vocab = content["model"], content["model"].get("vocab", {})
    before = _parts(content["normalizer"], "normalizers")
    cuts = _parts(content["pre_tokenizer"], "pretokenizers")
    whole = (
        model["type"] == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and any(cut["type"] == "ByteLevel" for cut in cuts)
        and all(cut["type"] == "ByteLevel" or _keeps(cut) for cut in cuts)
        and vocab.keys() >= set(ByteLevel.alphabet())
        and all(form["type"] in SHRINKS for form in before)
        and not any(token["lstrip"] or token["rstrip"] for token in content["added_tokens"])
        and content["truncation"] is None
    )
    if not whole:
        return None
    longest = max(map(len, [*vocab, *(token["content"] for token in content["added_tokens"])]))
    return longest * math.prod(SHRINKS[form["type"]] for form in before)


def _parts(entry: Mapping[str, Any] | None, several: str) -> list[Mapping[str, Any]]:
    if entry is None:
        return []
    return entry[several] if entry["type"] == "Sequence" else [entry]


def _keeps(cut: Mapping[str, Any]) -> bool:
    return cut["type"] == "Digits" or (cut["type"] == "Split" and cut["behavior"] != "Removed")


def _read_tokenizer(path: Path) -> Tokenizer:
    """Marks of thoughts and tool calls are text: where they are special tokens, `decode` would drop them."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    if not any(
        token.special and token.content in MARKS for token in tokenizer.get_added_tokens_decoder().values()
    ):
        return tokenizer
    content = json.loads(path.read_text())
    for token in content["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in MARKS
    return Tokenizer.from_str(json.dumps(content))


def _special(entry: tuple[str, object]) -> tuple[str, str | None]:
    name, value = entry
    if isinstance(value, dict):
        value = value.get("content")
    return name, value if name.endswith("_token") and isinstance(value, str) else None


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Renders templates as Hugging Face does."""
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


class Growing:
    """The text of one output. `push` returns what is final now: whole characters, no part of a stop string.

    All that `push` and `finish` return is what prompt + output decode to beyond the prompt's own text, up to
    the first stop string.
    """

    def __init__(self, text: Text, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._text = text
        self._stop = stop
        self._window = list(prompt_ids[-LOOK_BACK:])  # their text is settled up to _settled characters
        before = text.decode(self._window)
        if before.endswith(BROKEN):  # ids that were never a text: look at the output alone
            self._window, before = [], ""
        self._settled = len(before)
        self._whole = len(self._window)  # so many ids of the window end with a whole character
        self._held = ""  # final, but perhaps the beginning of a stop string
        self.stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """may_stop: a stop string that ends in what is new now ends the text."""
        self._window.append(token_id)
        text = self._text.decode(self._window)
        final_len = max(self._settled, len(text) - _num_broken(text))
        new, self._settled = text[self._settled : final_len], final_len
        if final_len == len(text):
            self._shorten(text)
        return self._before_stop(new, may_stop) if self._stop else new

    def finish(self) -> str:
        """The text that was held back; call it when no more tokens come."""
        return "" if self.stopped else self._held + self._text.decode(self._window)[self._settled :]

    def _shorten(self, text: str) -> None:
        """Forget the ids up to the last whole character but one, unless the rest means less without them."""
        window = self._window[self._whole :]
        tail = self._text.decode(window)
        if tail and text.endswith(tail):
            self._window, self._settled = window, len(tail)
        self._whole = len(self._window)

    def _before_stop(self, new: str, may_stop: bool) -> str:
        held = self._held + new
        ends = len(self._held) + 1  # what ended earlier was not allowed to stop
        found = [at for stop in self._stop if (at := held.find(stop, max(0, ends - len(stop)))) >= 0]
        if found and may_stop:
            self.stopped = True
            return held[: min(found)]
        final_len = len(held) - max(_overlap(held, stop) for stop in self._stop)
        self._held = held[final_len:]
        return held[:final_len]


def _num_broken(text: str) -> int:
    """Characters at the end that the next token may complete: one that is incomplete shows as 1 to 3."""
    if not text.endswith(BROKEN):
        return 0
    return min(len(text) - len(text.rstrip(BROKEN)), 3)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text with which stop may begin."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
