"""`/tokenize` and `/detokenize`, by vLLM's names."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from pydantic import model_validator

from hemiola.runtime.errors import Amount, Refused
from hemiola.runtime.serving.openai.base import Body, Items
from hemiola.runtime.serving.openai.chat import render
from hemiola.runtime.serving.openai.errors import named
from hemiola.runtime.serving.openai.message import Message
from hemiola.runtime.serving.openai.model import ServedModel, find_model
from hemiola.runtime.serving.openai.schema import Tool, as_chat, parse

MAX_IDS = 2**15  # of a call: each costs some microseconds


class TokenizeRequest(Body):
    """A prompt, or a conversation as `/v1/chat/completions` would read it."""

    model: str
    prompt: str | None = None
    messages: Items[Message] | None = None
    tools: Items[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True  # of a prompt
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise Refused("conflict", "prompt", message="give either prompt or messages")
        return self

    def names(self) -> dict[str, str]:
        return {} if self.messages is None else {"prompt": "messages"}


class DetokenizeRequest(Body):
    model: str
    tokens: Items[int]


AskedText = TypeVar("AskedText", TokenizeRequest, DetokenizeRequest)


def read_text(
    body: bytearray,
    kind: type[AskedText],
    make: Callable[[ServedModel, AskedText], Any],
    models: Mapping[str, ServedModel],
) -> str:
    """The answer to a body."""
    request = parse(kind, body)
    with named(request.names()):
        return json.dumps(make(find_model(models, request.model), request))


def tokenize(model: ServedModel, request: TokenizeRequest) -> dict[str, Any]:
    text, prompt = model.need_text("prompt"), request.prompt
    if prompt is None:
        asked = {"model": request.model, "messages": request.messages, "tools": request.tools}
        kwargs = {"chat_template_kwargs": request.chat_template_kwargs}
        prompt, _ = render(model, as_chat({**asked, **kwargs}))
    special = request.add_special_tokens and request.prompt is not None  # a template writes its own
    ids = text.encode(prompt, MAX_IDS, special)
    if len(ids) > MAX_IDS:
        message = f"the prompt is {len(ids)} tokens, at most {MAX_IDS} are read here"
        raise Refused("too_long", "prompt", len(ids), message=message)
    names = [model.tokens.name(token_id) for token_id in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.max_len, "tokens": ids, "token_strs": names}


def detokenize(model: ServedModel, request: DetokenizeRequest) -> dict[str, Any]:
    tokenizer = model.need_text("tokens").tokenizer
    last_id = tokenizer.get_vocab_size(with_added_tokens=True) - 1
    if len(request.tokens) > MAX_IDS:
        size = Amount(len(request.tokens), "ids")
        raise Refused("too_long", "tokens", size, f"at most {MAX_IDS} are read here", "send fewer")
    for at, token_id in enumerate(request.tokens):
        if not 0 <= token_id <= last_id:
            raise Refused("out_of_range", f"tokens[{at}]", token_id, f"the tokenizer has 0..{last_id}")
    return {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}
