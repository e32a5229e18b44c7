"""A body as requests to the engine: everything that its size makes dear, so that a thread may do it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Refused, shown
from hemiola.runtime.serving.ask import check_scores, check_total
from hemiola.runtime.serving.openai.chat import render
from hemiola.runtime.serving.openai.errors import named
from hemiola.runtime.serving.openai.guide import guide
from hemiola.runtime.serving.openai.model import ServedModel, find_model
from hemiola.runtime.serving.openai.prompt import PromptScores
from hemiola.runtime.serving.openai.reply import ChatChoice, Choice, Reply, TextChoice
from hemiola.runtime.serving.openai.response_reply import ResponseChoice, ResponseReply
from hemiola.runtime.serving.openai.responses import ResponsesRequest
from hemiola.runtime.serving.openai.schema import (
    DEFAULT_MAX_TOKENS,
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    parse,
)
from hemiola.runtime.serving.wire import Pieces

AnyRequest = TypeVar("AnyRequest", bound=ApiRequest)
REQUEST = 64  # tokens whose packing takes as long as the rest of a request's


class Work(NamedTuple):
    """One request to the engine for each choice."""

    asked: list[tuple[list[int], SamplingParams]]
    choices: Sequence[Choice]
    reply: Reply | ResponseReply

    async def take(self, pieces: Pieces) -> None:
        for index, piece in pieces:
            self.reply.count(index, piece)
            self.choices[index].take(piece)

    @property
    def num_tokens(self) -> int:
        """That the whole answer names: ids, and the best of each place."""
        tokens = (
            (choice.num_output_tokens + len(choice.prompt_ids))
            * (1 + (params.logprobs or 0) + (params.prompt_logprobs or 0))
            for choice, (_, params) in zip(self.choices, self.asked, strict=True)
        )
        return sum(tokens)

    @property
    def num_sent(self) -> int:
        """Tokens that go to the engine, and as many for each request as it is dear in itself."""
        return sum(len(ids) + REQUEST for ids, _ in self.asked)


class Prepared(NamedTuple):
    """What is left of a body once it is read."""

    options: StreamOptions | None  # of a stream of events
    names: dict[str, str]  # of its fields
    model: str
    work: Work


def prepare(
    body: bytearray,
    kind: type[AnyRequest],
    make: Callable[[ServedModel, AnyRequest], Work],
    models: Mapping[str, ServedModel],
    most_requests: int,
) -> Prepared:
    request = parse(kind, body)
    names = request.names()
    options = (request.stream_options or StreamOptions()) if request.stream else None
    model = find_model(models, request.model)
    with named(names):
        if request.num_requests > most_requests:
            message = f"prompts x n is {request.num_requests}, the server takes {most_requests} at once"
            raise Refused("too_long", "n", message=message, way_out="send fewer")
        return Prepared(options, names, model.name, make(model, request))


def completion(model: ServedModel, request: CompletionRequest) -> Work:
    prompts = [encode(model, prompt) for prompt in request.prompt]
    scores = [PromptScores(model, ids, request.prompt_logprobs, request.num_echoed) for ids in prompts]
    check_total(sum(map(len, prompts)), request.num_choices, scores[0].num_asked)
    max_tokens = request.max_tokens or DEFAULT_MAX_TOKENS
    if not request.stream:
        num_tokens = sum(min(max_tokens, model.max_len - len(ids)) for ids in prompts) * request.num_choices
        check_scores(num_tokens, request.logprobs)
    params = request.params(max_tokens, request.logprobs, prompt_logprobs=scores[0].num_asked)
    tokens = model.tokens if request.logprobs is not None else None
    choices: list[Choice] = []
    for prompt, ids, prompt_scores in zip(request.prompt, prompts, scores, strict=True):
        echo = _echo(model, prompt) if request.echo else ""
        for _ in params:
            choices.append(
                TextChoice(len(choices), ids, tokens, bool(request.return_token_ids), echo, prompt_scores)
            )
    asked = [(ids, each) for ids in prompts for each in params]
    return Work(asked, choices, Reply("text_completion", model, choices, len(params)))


def _echo(model: ServedModel, prompt: str | list[int]) -> str:
    """The text of a prompt; ids that no engine has are refused in its words."""
    if isinstance(prompt, str):
        return prompt
    for at, token_id in enumerate(prompt):
        if not 0 <= token_id < 2**31:
            message = f"token id {shown(token_id)} at position {at} of the prompt is not in the vocabulary"
            raise Refused("out_of_range", "prompt", token_id, message=message)
    return model.need_text("echo").decode(prompt)


def chat(model: ServedModel, request: ChatRequest) -> Work:
    prompt, expected = render(model, request)
    structured = guide(request, expected)
    ids = encode(model, prompt, special=False)
    check_total(len(ids), request.num_choices, request.prompt_logprobs)
    max_tokens = request.most_tokens or max(model.max_len - len(ids), 1)
    if not request.stream:
        check_scores(min(max_tokens, model.max_len - len(ids)) * request.num_choices, request.num_logprobs)
    params = request.params(max_tokens, request.num_logprobs, structured, request.prompt_logprobs)
    tokens = model.tokens if request.logprobs else None
    with_ids, scores = bool(request.return_token_ids), PromptScores(model, ids, request.prompt_logprobs)
    choices = [ChatChoice(i, ids, tokens, with_ids, expected, scores) for i in range(len(params))]
    reply = Reply("chat.completion", model, choices, len(params), scores)
    return Work([(ids, each) for each in params], choices, reply)


def response(model: ServedModel, request: ResponsesRequest) -> Work:
    as_chat = request.chat()
    prompt, expected = render(model, as_chat)
    structured = guide(as_chat, expected)
    ids = encode(model, prompt, special=False)
    max_tokens = request.max_output_tokens or max(model.max_len - len(ids), 1)
    (params,) = as_chat.params(max_tokens, None, structured)
    choice = ResponseChoice(ids, expected)
    reply = ResponseReply(model, request, choice)
    return Work([(ids, params)], [choice], reply)


def encode(model: ServedModel, prompt: str | list[int], special: bool = True) -> list[int]:
    """The ids of a prompt. One that can never fit is refused here: it would be sent once for each choice."""
    if isinstance(prompt, str):
        prompt = model.need_text("prompt").encode(prompt, model.max_len, special)
    if len(prompt) > model.max_len:
        limit = f"max_len={model.max_len} must hold it and at least one more"
        message = f"prompt is {len(prompt)} tokens, {limit}"
        raise Refused("too_long", "prompt", len(prompt), message=message, way_out="shorten it")
    return prompt
