"""Puts the pieces of a request together."""

from collections.abc import Callable

from hemiola.runtime.api import Logprob, Output, Piece, PromptLogprobs
from hemiola.runtime.schedule.request import Request


class Collector:
    """An on_piece that puts a request's pieces together."""

    def __init__(self, request: Request, on_done: Callable[["Collector"], None]) -> None:
        self.request = request
        self.output: Output | None = None
        self._on_done = on_done
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprob] | None = None if request.params.logprobs is None else []
        self._prompt_logprobs: PromptLogprobs | None = None

    def __call__(self, piece: Piece) -> None:
        self._text.append(piece.text)
        self._token_ids += piece.token_ids
        if self._logprobs is not None and piece.logprobs is not None:
            self._logprobs += piece.logprobs
        self._prompt_logprobs = self._prompt_logprobs or piece.prompt_logprobs
        if piece.finish_reason is None or piece.metrics is None:
            return
        self.output = Output(
            prompt_token_ids=self.request.ids[: self.request.prompt_len].tolist(),
            token_ids=self._token_ids,
            text="".join(self._text),
            finish_reason=piece.finish_reason,
            logprobs=self._logprobs,
            metrics=piece.metrics,
            error=piece.error,
            prompt_logprobs=self._prompt_logprobs,
        )
        self._on_done(self)
