"""Pieces as the chunks that Dynamo's frontend reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from hemiola.runtime.api import FinishReason, Logprob, Piece, PromptLogprobs

Chunk = dict[str, Any]
NOTHING_USED = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
PROBED: Chunk = {"token_ids": [], "index": 0, "finish_reason": "stop", "completion_usage": NOTHING_USED}


def chunk_of(piece: Piece, link: Mapping[str, str]) -> Chunk:
    """link: tells the next worker how long the prompt was."""
    chunk: Chunk = {"token_ids": piece.token_ids, "index": 0, "worker_trace_link": link}
    return chunk | _scores(piece.logprobs) if piece.logprobs else chunk


def last_chunk(piece: Piece, prompt_logprobs: PromptLogprobs | None, link: Mapping[str, str]) -> Chunk:
    """link: a worker may die before the frontend sees that nothing follows; then it asks another one."""
    assert piece.metrics is not None
    num_prompt, num_output = piece.metrics.num_prompt_tokens, piece.metrics.num_output_tokens
    chunk = chunk_of(piece, link) | {
        "finish_reason": piece.finish_reason,
        "completion_usage": _usage(num_prompt, num_output, piece.metrics.cached_tokens),
    }
    if prompt_logprobs is not None:
        chunk["engine_data"] = {"prompt_logprobs": [score and _of_prompt(score) for score in prompt_logprobs]}
    return chunk


def ended_chunk(reason: FinishReason, num_prompt: int, num_output: int) -> Chunk:
    """Of a request whose output is whole already."""
    usage = _usage(num_prompt, num_output, 0)
    return {"token_ids": [], "index": 0, "finish_reason": reason, "completion_usage": usage}


def _usage(num_prompt: int, num_output: int, num_cached: int) -> Chunk:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": min(num_cached, num_prompt)},
    }


def _scores(logprobs: Sequence[Logprob]) -> Chunk:
    return {
        "log_probs": [score.logprob for score in logprobs],
        "top_logprobs": [_best(score) for score in logprobs],
    }


def _best(score: Logprob) -> list[dict[str, Any]]:
    """The frontend adds the texts; for 0 best tokens it wants the chosen one."""
    best = score.top or ((score.token_id, score.logprob),)
    return [
        {"rank": rank, "token_id": token_id, "token": None, "logprob": logprob}
        for rank, (token_id, logprob) in enumerate(best, 1)
    ]


def _of_prompt(score: Logprob) -> dict[str, Any]:
    top = {
        str(token_id): {"logprob": logprob, "rank": n} for n, (token_id, logprob) in enumerate(score.top, 1)
    }
    return {str(score.token_id): {"logprob": score.logprob}} | top
