"""Text to ids and back: tokenizer, chat template, and text that grows token by token."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path

from tokenizers import Tokenizer

from hemiola.runtime.errors import Name, Refused, one_line
from hemiola.runtime.fields import MOST_CHARACTERS
from hemiola.runtime.json_file import check_size, read_json
from hemiola.runtime.stops import StopStrings
from hemiola.runtime.template import ChatTemplate
from hemiola.runtime.tokenizer import FILES, most_characters, panics_as_errors, read_tokenizer

BROKEN = "\ufffd"  # what an incomplete character decodes to
ROLES = {"system", "user", "assistant"}  # those that every template shows
MOST_DOUBTFUL = 16  # parts of messages that a template may not read: each costs another rendering
LABELS = {"role", "content", "name", "tool_call_id", "reasoning_content"}  # good templates drop some of them
AGAIN = "run build-engine again"
EXAMPLE = "[{'role': 'user', 'content': TEXT}]"
MAX_SPECIAL = 2**16  # characters of special tokens, which a template may repeat
LONG_TEXT = 4096  # characters; shorter ones are encoded before another thread could wake
LOOK_BACK = 6  # tokens before the text, so that a decoder sees where a word begins
LONG_WINDOW = 32  # tokens; half of them hold more than the 3 bytes and 3 characters that may yet change


class Text:
    """An engine's tokenizer directory."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise Refused("not_found", message=f"{path} is missing", way_out=AGAIN)
        for name, most_bytes in FILES.items():
            if (folder / name).is_file():
                check_size(folder / name, AGAIN, most_bytes)
        try:
            self.tokenizer: Tokenizer = read_tokenizer(path)
        except Exception as error:  # tokenizers raises bare Exception
            message = f"{path} is not a tokenizer ({one_line(error)})"
            raise Refused("damaged", message=message, way_out=AGAIN) from None
        config = folder / "tokenizer_config.json"
        content = read_json(config, AGAIN) if config.is_file() else {}
        if not isinstance(content, dict):
            raise Refused("damaged", message=f"{config} is no JSON object", way_out=AGAIN)
        self.special = {name: text for name, text in map(_special, content.items()) if text is not None}
        if (size := sum(map(len, [*self.special, *self.special.values()]))) > MAX_SPECIAL:
            message = f"{config} names special tokens of {size} characters, at most {MAX_SPECIAL} are read"
            raise Refused("damaged", message=message, way_out=AGAIN)
        template = folder / "chat_template.jinja"
        try:
            self.template = template.read_text(encoding="utf-8") if template.is_file() else None
        except UnicodeDecodeError as error:
            message = f"{template} is not UTF-8 ({one_line(error)})"
            raise Refused("damaged", message=message, way_out=AGAIN) from None

    def __getstate__(self) -> dict[str, object]:
        """A process beside the server gets one; what `token_text` keeps is a function of this process."""
        return {name: value for name, value in self.__dict__.items() if name != "token_text"}

    @cached_property
    def _max_characters(self) -> int | None:
        return most_characters(json.loads(self.tokenizer.to_str()))

    def encode(self, text: str, max_len: int | None = None, special: bool = True) -> list[int]:
        """Ids of a text. special: with the tokens that the tokenizer puts around it; a text that begins with
        a BOS gets no second one. A chat's prompt has them from its template.

        What cannot fit into max_len tokens is refused unread: to read 60 MB takes minutes and gigabytes.
        """
        if max_len is not None and len(text) > max(max_len, LONG_TEXT):
            max_characters = self._max_characters
            if max_characters is not None and len(text) > (max_len + 1) * max_characters:  # one: a second BOS
                message = (
                    f"prompt is {len(text)} characters, and max_len={max_len} tokens have at most"
                    f" {max_characters} each"
                )
                raise Refused("too_long", "prompt", len(text), message=message, way_out="shorten it")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"prompt is not valid Unicode at character {error.start} (a lone surrogate)"
            raise Refused("malformed", "prompt", message=message, way_out="remove it") from None
        ids = self._ids(text, special)
        bos = self.special.get("bos_token")
        if (
            special
            and bos is not None
            and ids[:2] == [self.tokenizer.token_to_id(bos)] * 2
            and text.startswith(bos)
        ):
            return ids[1:]
        return ids

    def encode_words(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return self._ids(text, False)

    def _ids(self, text: str, special: bool) -> list[int]:
        try:
            with panics_as_errors():
                if len(text) < LONG_TEXT:
                    return self.tokenizer.encode(text, add_special_tokens=special).ids
                # while which other threads run
                return self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except Exception as error:  # tokenizers raises nothing narrower
            message = f"the engine's tokenizer fails on this text ({one_line(error)})"
            raise Refused("failed", "prompt", message=message, way_out="change it") from None

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    @cached_property
    def token_text(self) -> Callable[[int], str | None]:
        """What `decode` makes of one token. None: `decode` leaves it out, since it is special or not in the
        vocabulary."""
        tokenizer = self.tokenizer
        added = tokenizer.get_added_tokens_decoder()
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

        def decoded(token_id: int) -> str | None:
            if token_id in special_ids or tokenizer.id_to_token(token_id) is None:
                return None
            return tokenizer.decode([token_id], skip_special_tokens=True)

        return cache(decoded)  # asked for every token of every text

    def chat(self, messages: Sequence[Mapping[str, object]], **variables: object) -> str:
        """The prompt for a conversation, up to where the assistant speaks; nothing it says vanishes."""
        if self.template is None:
            way_out = "pass a prompt, or build from a checkpoint that has one"
            raise Refused(
                "unsupported", "messages", message="the engine has no chat template", way_out=way_out
            )
        if not all(
            isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
        ):
            said, way_out = "messages must have a role and a content each", f"pass {EXAMPLE}"
            raise Refused("missing", "messages", message=said, way_out=way_out)
        for index, message in enumerate(messages):
            content = message.get("content")
            if content is not None and not isinstance(content, str):
                way_out = "pass text, other kinds are not served"
                raise Refused("wrong_type", f"messages[{index}].content", type(content), way_out=way_out)
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self.special, **variables}
        prompt = self._render(messages, given)
        for num_before, (index, name) in enumerate(self._doubtful(messages)):
            if num_before == MOST_DOUBTFUL:
                many = f"messages have more than {MOST_DOUBTFUL} roles and fields"
                message = f"{many} that the chat template does not name"
                raise Refused("too_long", "messages", message=message, way_out="use fewer")
            if prompt == self._without(messages, index, name, given):
                field, role = f"messages[{index}].{_label(name)}", _label(messages[index]["role"])
                why = f" changes nothing: the chat template does not show that of a message by {role}"
                raise Refused("unsupported", field, message=(Name(field), why), way_out="take it out")
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
        template = self.template or ""
        return name in template and re.search(rf"\b{re.escape(name)}\b", template) is not None

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
        return self._chat_template.render({"messages": messages, **given})

    @property
    def variables(self) -> frozenset[str]:
        """What the chat template reads; it would ignore anything else."""
        return self._chat_template.variables

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.template or "")


def _label(name: object) -> str:
    """A caller's own name of something, in a line of ours."""
    return one_line(str(name)[:MOST_CHARACTERS])


def _special(entry: tuple[str, object]) -> tuple[str, str | None]:
    name, value = entry
    if isinstance(value, dict):
        value = value.get("content")
    return name, value if name.endswith("_token") and isinstance(value, str) else None


class Growing:
    """The text of one output. `push` returns what is final now: whole characters, no part of a stop string.

    All that `push` and `finish` return is what prompt + output decode to beyond the prompt's own text, up to
    the first stop string.
    """

    def __init__(self, text: Text, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._text = text
        self._stop = StopStrings(stop) if stop else None
        self._window = list(prompt_ids[-LOOK_BACK:])  # ids whose text may yet change, and some before them
        self._shown = text.decode(self._window)  # the window's text that is final
        if self._shown.endswith(BROKEN):  # ids that were never a text: look at the output alone
            self._window, self._shown = [], ""
        self._whole = len(self._window)  # so many ids of the window end with a whole character
        self._held = ""  # final, but perhaps the beginning of a stop string
        self.stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """may_stop: a stop string that ends in what is new now ends the text."""
        own_text = self._text.token_text(token_id)
        if own_text is None:
            return ""
        self._window.append(token_id)
        text = self._text.decode(self._window)
        if self._whole and not text.startswith(self._shown):  # bytes behind others took their text back
            del self._window[: self._whole]
            self._whole, self._shown = 0, ""
            text = self._text.decode(self._window)
        settled = len(self._shown)
        num_broken = _num_broken(text) if text.endswith(BROKEN) else 0
        final_len = max(settled, len(text) - num_broken)
        self._shown = text[:final_len]
        new = text[settled:final_len]
        self._shorten(text, own_text)
        return self._before_stop(new, may_stop) if self._stop is not None else new

    def finish(self) -> str:
        """The text that was held back; call it when no more tokens come."""
        return "" if self.stopped else self._held + self._text.decode(self._window)[len(self._shown) :]

    def _shorten(self, text: str, last_text: str) -> None:
        """Forget the ids up to the last whole character but one, unless the rest means less without them.
        last_text: of the last id by itself.

        A longer window loses its first ids in any case: no character has so many, and in UTF-8 the text
        behind one that is cut in two stays what it was.
        """
        if len(self._shown) == len(text):
            is_last = self._whole == len(self._window) - 1
            tail = last_text if is_last else self._text.decode(self._window[self._whole :])
            if tail and text.endswith(tail):
                del self._window[: self._whole]
                self._shown = tail
            self._whole = len(self._window)
        if len(self._window) > LONG_WINDOW:
            num_cut = len(self._window) - LONG_WINDOW // 2
            del self._window[:num_cut]
            tail = self._text.decode(self._window)
            self._shown = tail[: max(0, len(tail) - (len(text) - len(self._shown)))]
            self._whole = max(0, self._whole - num_cut)

    def _before_stop(self, new: str, may_stop: bool) -> str:
        assert self._stop is not None
        stop_at = self._stop.push(new)
        held = self._held + new
        if stop_at is not None and may_stop:
            self.stopped = True
            return held[: len(self._held) + stop_at]
        final_len = len(held) - self._stop.held_len
        self._held = held[final_len:]
        return held[:final_len]


def _num_broken(text: str) -> int:
    """Characters at the end that the next token may complete: one that is incomplete shows as 1 to 3."""
    end = text[-3:]
    return len(end) - len(end.rstrip(BROKEN))
