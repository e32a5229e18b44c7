"""Log-probabilities of a prompt's own tokens in an answer: vLLM's `prompt_logprobs`, and an echo's.

All choices of a prompt share them: the first one's request computes them.
"""

from typing import Any

from hemiola.runtime.api import Logprob, Piece, PromptLogprobs
from hemiola.runtime.serving.openai.model import ServedModel, Tokens, make_decoder
from hemiola.runtime.serving.openai.parts import listed

Json = dict[str, Any]


class PromptScores:
    """What is asked of one prompt, and found of it."""

    def __init__(
        self, model: ServedModel, ids: list[int], num_top: int | None, num_echoed: int | None = None
    ):
        """num_top: as `prompt_logprobs` asks; num_echoed: `logprobs`, where the prompt is echoed."""
        self._model, self._ids = model, ids
        self.num_top, self.num_echoed = num_top, num_echoed
        self._logprobs: PromptLogprobs | None = None

    @property
    def num_asked(self) -> int | None:
        """For the engine."""
        asked = [num for num in (self.num_top, self.num_echoed) if num is not None]
        return max(asked, default=None)

    def take(self, piece: Piece) -> None:
        self._logprobs = self._logprobs or piece.prompt_logprobs

    def table(self) -> Json:
        """`prompt_logprobs`, if it was asked for: for each token itself and the best, by token id."""
        if self.num_top is None or self._logprobs is None:
            return {}
        return {"prompt_logprobs": listed(self._entry, self._logprobs)}

    def _entry(self, entry: Logprob | None) -> Json | None:
        """Of a token that is none of the best, no rank is known."""
        if entry is None:  # the first token's
            return None
        named = {entry.token_id: {"logprob": entry.logprob, "rank": None}}
        named |= {
            best: {"logprob": value, "rank": n + 1}
            for n, (best, value) in enumerate(entry.top[: self.num_top])
        }
        for token_id, value in named.items():
            value["decoded_token"] = self._model.tokens.name(token_id) if self._model.text else None
        return {str(token_id): value for token_id, value in named.items()}

    def echoed(self, tokens: Tokens, text: str) -> dict[str, list[Any]]:
        """What stands before the answer's own tokens in a completion's `logprobs`."""
        logprobs, num_top = self._logprobs, self.num_echoed
        if num_top is None or logprobs is None:
            return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        *offsets, end = tokens.offsets(self._ids, 0, make_decoder())
        unwritten = max(0, end - len(text))  # a token that the tokenizer puts before a text is no part of it
        return {
            "tokens": [tokens.name(token_id) for token_id in self._ids],
            "token_logprobs": [entry and entry.logprob for entry in logprobs],
            "top_logprobs": [
                entry and {tokens.name(best): value for best, value in entry.top[:num_top]}
                for entry in logprobs
            ],
            "text_offset": [max(0, offset - unwritten) for offset in offsets],
        }
