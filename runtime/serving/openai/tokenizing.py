"""`/tokenize` and `/detokenize`, by vLLM's names."""

from typing import Any, Self

from pydantic import model_validator

from hemiola.runtime.serving.openai.chat import render
from hemiola.runtime.serving.openai.errors import ApiError
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.serving.openai.schema import Body, ChatRequest, Items, Message, Tool, validated

MOST_IDS = 2**15  # of a call: each costs some microseconds


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
            raise ApiError(400, "give either prompt or messages", param="prompt", code="invalid_value")
        return self


class DetokenizeRequest(Body):
    model: str
    tokens: Items[int]


def tokenize(model: ServedModel, request: TokenizeRequest) -> dict[str, Any]:
    text, prompt = model.need_text("the prompt is"), request.prompt
    if prompt is None:
        asked = {"model": request.model, "messages": request.messages, "tools": request.tools}
        kwargs = {"chat_template_kwargs": request.chat_template_kwargs}
        prompt, _ = render(model, validated(ChatRequest, {**asked, **kwargs}, TokenizeRequest))
    special = request.add_special_tokens and request.prompt is not None  # a template writes its own
    ids = text.encode(prompt, MOST_IDS, special)
    if len(ids) > MOST_IDS:
        raise ApiError(
            400, f"the prompt is {len(ids)} tokens, at most {MOST_IDS} are read here", param="prompt"
        )
    names = [model.tokens.name(token_id) for token_id in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.max_len, "tokens": ids, "token_strs": names}


def detokenize(model: ServedModel, request: DetokenizeRequest) -> dict[str, Any]:
    tokenizer = model.need_text("the answer is").tokenizer
    most = tokenizer.get_vocab_size(with_added_tokens=True) - 1
    if len(request.tokens) > MOST_IDS:
        raise ApiError(
            400, f"tokens are {len(request.tokens)}, at most {MOST_IDS} are read here", param="tokens"
        )
    for at, token_id in enumerate(request.tokens):
        if not 0 <= token_id <= most:
            raise ApiError(
                400, f"tokens[{at}] is {token_id}, the tokenizer has 0..{most}", param="tokens",
                code="invalid_value",
            )  # fmt: skip
    return {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}
