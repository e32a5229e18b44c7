"""Pieces as the chunks that Dynamo's frontend reads."""

from typing import Any

from hemiola.runtime.api import Logprob, Piece, PromptLogprobs
from hemiola.runtime.dynamo.request import link_of

Chunk = dict[str, Any]


def chunk_of(piece: Piece, prompt_len: int, prompt_logprobs: PromptLogprobs | None = None) -> Chunk:
    """prompt_logprobs: of a request's last piece."""
    chunk: Chunk = {"token_ids": piece.token_ids, "index": 0}
    if piece.logprobs:
        chunk["log_probs"] = [score.logprob for score in piece.logprobs]
        chunk["top_logprobs"] = [_best(score) for score in piece.logprobs]
    if piece.finish_reason is None or piece.metrics is None:
        return chunk | {"worker_trace_link": link_of(prompt_len)}
    num_prompt, num_output = piece.metrics.num_prompt_tokens, piece.metrics.num_output_tokens
    chunk["finish_reason"] = piece.finish_reason
    chunk["completion_usage"] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": min(piece.metrics.cached_tokens, num_prompt)},
    }
    if prompt_logprobs is not None:
        chunk["engine_data"] = {"prompt_logprobs": [score and _of_prompt(score) for score in prompt_logprobs]}
    return chunk


def _best(score: Logprob) -> list[dict[str, Any]]:
    """The frontend adds the texts; for 0 best tokens it wants the chosen one."""
    best = score.top or ((score.token_id, score.logprob),)
    return [
        {"rank": rank, "token_id": token_id, "token": None, "logprob": logprob}
        for rank, (token_id, logprob) in enumerate(best, 1)
    ]


def _of_prompt(score: Logprob) -> dict[str, Any]:
    found = {
        str(token_id): {"logprob": logprob, "rank": n} for n, (token_id, logprob) in enumerate(score.top, 1)
    }
    return {str(score.token_id): {"logprob": score.logprob}} | found
