"""Answers in OpenAI's form: one object at the end, or chunks as they come."""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from hemiola.runtime.api import Logprob, Metrics, Piece
from hemiola.runtime.serving.openai.answer import AnswerPart, Expected, Splitter
from hemiola.runtime.serving.openai.errors import ApiError
from hemiola.runtime.serving.openai.model import ServedModel, Tokens, make_decoder
from hemiola.runtime.serving.openai.parts import ENCODER, has_many, in_parts, listed, parts_of
from hemiola.runtime.serving.openai.prompt import PromptScores

Json = dict[str, Any]


class Choice:
    """One of a request's answers: takes pieces, gives a chunk's `choices`, and at the end the whole."""

    def __init__(self, index: int, prompt_ids: list[int], tokens: Tokens | None, with_ids: bool) -> None:
        self.index = index
        self.prompt_ids = prompt_ids
        self.metrics: Metrics | None = None
        self.num_output_tokens = 0
        self._tokens = tokens  # if log-probabilities were asked for
        self._with_ids = with_ids
        self._token_ids: list[int] = []  # all of them, when whole; those not yet in a chunk, when streamed
        self._logprobs: list[Logprob] = []
        self._finish_reason: str | None = None
        self._begun = False

    def take(self, piece: Piece) -> None:
        self.num_output_tokens += len(piece.token_ids)
        self._token_ids += piece.token_ids
        self._logprobs += piece.logprobs or ()
        self._finish_reason = piece.finish_reason
        self.metrics = piece.metrics

    def _common(self, streamed: bool) -> Json:
        """Tokens go with the text that they became, or with the next one if that is still held back."""
        common: Json = {"index": self.index, "logprobs": None, "finish_reason": None}
        if self._tokens is not None and (self._logprobs or not streamed):
            common["logprobs"] = self._logprobs_json(self._tokens)
        if self._with_ids:
            common["token_ids"] = self._token_ids
            if not self._begun:
                common["prompt_token_ids"] = self.prompt_ids
        self._begun = True
        self._token_ids, self._logprobs = [], []
        return common

    def _logprobs_json(self, tokens: Tokens) -> Json:
        raise NotImplementedError

    def chunks(self, piece: Piece) -> list[Json]:
        raise NotImplementedError

    def whole(self) -> Json:
        raise NotImplementedError


class TextChoice(Choice):
    """Of a completion."""

    def __init__(
        self,
        index: int,
        prompt_ids: list[int],
        tokens: Tokens | None,
        with_ids: bool,
        echo: str,
        scores: PromptScores,
    ) -> None:
        super().__init__(index, prompt_ids, tokens, with_ids)
        self._scores = scores
        self._texts = [echo]  # not yet given out
        self._echo, self._offset, self._decoder = echo, len(echo), make_decoder()

    def take(self, piece: Piece) -> None:
        super().take(piece)
        self._scores.take(piece)
        self._texts.append(piece.text)

    def chunks(self, piece: Piece) -> list[Json]:
        self.take(piece)
        if not any(self._texts) and piece.finish_reason is None and not self._with_ids:
            return []
        return [self.whole(streamed=True)]

    def whole(self, streamed: bool = False) -> Json:
        reason, text = self._finish_reason, "".join(self._texts)
        self._texts, of_prompt = [], self._scores.table()
        return {"text": text, **self._common(streamed), "finish_reason": reason, **of_prompt}

    def _logprobs_json(self, tokens: Tokens) -> Json:
        ids = [logprob.token_id for logprob in self._logprobs]
        *offsets, self._offset = tokens.offsets(ids, self._offset, self._decoder)
        fields = {
            "tokens": [tokens.name(token_id) for token_id in ids],
            "token_logprobs": [logprob.logprob for logprob in self._logprobs],
            "top_logprobs": [
                {tokens.name(best): value for best, value in logprob.top} for logprob in self._logprobs
            ],
            "text_offset": offsets,
        }
        if self._begun:
            return fields
        echoed = self._scores.echoed(tokens, self._echo)
        return {name: echoed[name] + values for name, values in fields.items()}


class ChatChoice(Choice):
    """Of a chat: its text is split into reasoning, content and calls."""

    def __init__(
        self,
        index: int,
        prompt_ids: list[int],
        tokens: Tokens | None,
        with_ids: bool,
        expected: Expected,
        scores: PromptScores,
    ) -> None:
        super().__init__(index, prompt_ids, tokens, with_ids)
        self._scores = scores
        self._answer = Splitter(expected)
        self._parts: list[AnswerPart] = []

    def take(self, piece: Piece) -> None:
        super().take(piece)
        self._scores.take(piece)
        self._parts += self._answer.push(piece.text)
        if piece.finish_reason is not None:
            self._parts += self._answer.finish(cut=piece.finish_reason == "length")
            if self._answer.num_calls and piece.finish_reason == "stop":
                self._finish_reason = "tool_calls"

    def chunks(self, piece: Piece) -> list[Json]:
        begun = self._begun
        self.take(piece)
        deltas = [_delta(part) for part in self._parts]
        self._parts = []
        if not begun:
            deltas.insert(0, {"role": "assistant", "content": ""})
        made = [{"delta": delta, **self._common(streamed=True)} for delta in deltas]
        if self._finish_reason is not None:
            made.append({"delta": {}, **self._common(streamed=True), "finish_reason": self._finish_reason})
        elif self._with_ids and not made:
            made.append({"delta": {}, **self._common(streamed=True)})
        return made

    def whole(self) -> Json:
        pieces: dict[tuple[str, int], list[AnswerPart]] = {("content", 0): [], ("reasoning", 0): []}
        for part in self._parts:
            pieces.setdefault((part.kind, part.call_id), []).append(part)
        texts = {which: "".join(part.text for part in parts) for which, parts in pieces.items()}
        content, reasoning = texts["content", 0], texts["reasoning", 0]
        calls = [_call(pieces[which][0]._replace(text=texts[which])) for which in texts if which[0] == "call"]
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message |= {"tool_calls": calls, "content": content or None}
        return {"message": message, **self._common(streamed=False), "finish_reason": self._finish_reason}

    def _logprobs_json(self, tokens: Tokens) -> Json:
        def entry(logprob: Logprob) -> Json:
            best = [_token(tokens, *best) for best in logprob.top]
            return _token(tokens, logprob.token_id, logprob.logprob) | {"top_logprobs": best}

        return {"content": listed(entry, self._logprobs), "refusal": None}


def _delta(part: AnswerPart) -> Json:
    match part.kind:
        case "reasoning":
            return {"reasoning_content": part.text}
        case "content":
            return {"content": part.text}
        case _ if part.name:
            return {"tool_calls": [{"index": part.call_id, **_call(part)}]}
        case _:
            return {"tool_calls": [{"index": part.call_id, "function": {"arguments": part.text}}]}


def _call(part: AnswerPart) -> Json:
    function = {"name": part.name, "arguments": part.text}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _token(tokens: Tokens, token_id: int, logprob: float) -> Json:
    return {"token": tokens.name(token_id), "logprob": logprob, "bytes": list(tokens.bytes(token_id))}


class Reply:
    """A request's answer: what stands around its choices."""

    def __init__(
        self,
        kind: str,
        model: ServedModel,
        choices: Sequence[Choice],
        num_each: int,
        scores: PromptScores | None = None,
    ) -> None:
        """scores: of a chat's prompt, which stand beside its choices."""
        prefix = "chatcmpl" if kind == "chat.completion" else "cmpl"
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.choices = choices
        self._kind, self._scores = kind, scores
        self._head = {
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": f"fp_{model.identity[:10]}",
        }
        self._num_each = num_each
        self._num_prompt = sum(len(choice.prompt_ids) for choice in choices[::num_each])
        self._num_output = self._num_cached = 0  # so far: a chunk for each of a thousand adds up nothing
        chunk = "chat.completion.chunk" if kind == "chat.completion" else kind
        self._opening = ENCODER.encode({"id": self.id, "object": chunk, **self._head})[:-1]  # of a chunk

    def count(self, index: int, piece: Piece) -> None:
        """A choice's piece has come. Of the choices of one prompt the first says what was cached."""
        self._num_output += len(piece.token_ids)
        if piece.metrics is not None and index % self._num_each == 0:
            self._num_cached += piece.metrics.cached_tokens

    def event(self, choices: list[Json], more: Json) -> str:
        """A chunk, as a server-sent event."""
        written = ",".join(in_parts(one) if has_many(one) else ENCODER.encode(one) for one in choices)
        return event(f'{self._opening},"choices":[{written}]{"," if more else ""}{ENCODER.encode(more)[1:]}')

    def text(self) -> str:
        """The whole answer."""
        parts = [ENCODER.encode({"id": self.id, "object": self._kind, **self._head})[:-1], ',"choices":[']
        for choice in self.choices:
            parts += parts_of(choice.whole())
            parts.append(",")
        parts[-1] = "],"
        of_prompt = self._scores.table() if self._scores is not None else {}
        return "".join([*parts, in_parts(of_prompt | self.totals())[1:]])

    def ending(self, include_usage: bool) -> str:
        """The last events of a stream."""
        return (self.event([], self.totals()) if include_usage else "") + event("[DONE]")

    def failed(self, error: ApiError) -> str:
        """The last event of a stream that cannot go on."""
        return event(ENCODER.encode(error.body()))

    def totals(self) -> Json:
        """Usage, and how drafts fared."""
        drafts = speculation([choice.metrics for choice in self.choices if choice.metrics is not None])
        return {
            "usage": self.usage(),
            **({"metrics": {"speculative_decoding": drafts}} if drafts else {}),
        }

    def usage(self) -> Json:
        """So far. What the prefix cache had is known at the end."""
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_output,
            "total_tokens": self._num_prompt + self._num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }


def event(text: str) -> str:
    return f"data: {text}\n\n"


def speculation(all_metrics: Iterable[Metrics]) -> Json:
    """Counts as aiperf reads them; empty if nothing was drafted. A step with k drafts accepts 0 to k."""
    all_metrics = list(all_metrics)
    width = max((len(metrics.drafted) for metrics in all_metrics), default=0)
    drafted = _added([metrics.drafted for metrics in all_metrics], width)
    accepted = _added([metrics.accepted for metrics in all_metrics], width)
    if not width or not drafted[0]:
        return {}
    steps = drafted[0]
    at_least = [steps, *accepted, 0]
    return {
        "mean_acceptance_length": 1 + sum(accepted) / steps,
        "draft_acceptance_rate": sum(accepted) / sum(drafted),
        "acceptance_histogram": [at_least[i] - at_least[i + 1] for i in range(width + 1)],
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_steps": steps,
        "num_spec_tokens": width,
    }


def _added(counts: Sequence[Sequence[int]], width: int) -> list[int]:
    return [sum(each[i] for each in counts if i < len(each)) for i in range(width)]
