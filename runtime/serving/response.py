"""Pieces as the tensors of a response; model_repo/hemiola/config.pbtxt names them all."""

import json
from dataclasses import asdict
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from hemiola.runtime.api import Logprob, Piece, PromptLogprobs
from hemiola.runtime.serving.stream import Stream

LINE = ",\n"
AT_ONCE = 64  # log-probabilities that are encoded by one call, in 2 ms


class ResponseTensor(NamedTuple):
    """A tensor."""

    name: str
    values: "np.ndarray[Any, Any]"


def tensors(stream: Stream, said: list[list[Piece]], over: bool) -> list[ResponseTensor]:
    """One response that says all of these pieces, those of each branch."""
    texts = ["".join(piece.text for piece in pieces) for pieces in said]
    texts, stream.echo = [stream.echo + text for text in texts], ""
    ids = [[token_id for piece in pieces for token_id in piece.token_ids] for pieces in said]
    for branch, branch_ids in zip(stream.branches, ids, strict=True):
        branch.num_tokens += len(branch_ids)
    out = [string_tensor("text_output", texts), int_tensor("output_ids", list(chain(*ids)))]
    logprobs = [[logprob for piece in pieces for logprob in piece.logprobs or ()] for pieces in said]
    out += logprob_tensors(stream, logprobs, over)
    of_prompt = [piece.prompt_logprobs for pieces in said for piece in pieces if piece.prompt_logprobs]
    out += [
        string_tensor("prompt_logprobs", [write_prompt_logprobs(prompt_logprobs)])
        for prompt_logprobs in of_prompt
    ]
    if over:
        lasts = [pieces[-1] for pieces in said]
        reasons = [
            "timeout" if last.finish_reason == "cancelled" else str(last.finish_reason) for last in lasts
        ]
        out += [
            string_tensor("finish_reason", reasons),
            int_tensor("num_input_tokens", [len(stream.input_ids)]),
            int_tensor("num_output_tokens", [branch.num_tokens for branch in stream.branches]),
        ]
        if stream.flags["return_input_ids"]:
            out.append(int_tensor("input_ids", stream.input_ids))
        if stream.flags["return_metrics"]:
            metrics = [json.dumps(asdict(last.metrics)) for last in lasts if last.metrics is not None]
            out.append(string_tensor("metrics", metrics))
    return out


def logprob_tensors(stream: Stream, logprobs: list[list[Logprob]], over: bool) -> list[ResponseTensor]:
    """Ours, and TensorRT-LLM's."""
    if not any(logprobs) and not (over and stream.flags["return_log_probs"]):
        return []
    if not stream.flags["return_log_probs"]:
        return [string_tensor("logprobs", [as_json(scores) for scores in logprobs])]
    for branch, scores in zip(stream.branches, logprobs, strict=True):
        branch.cum_logprob += sum(logprob.logprob for logprob in scores)
    out = [float_tensor("output_log_probs", [logprob.logprob for scores in logprobs for logprob in scores])]
    if over:
        out.append(float_tensor("cum_log_probs", [branch.cum_logprob for branch in stream.branches]))
    return out


def write_prompt_logprobs(logprobs: PromptLogprobs) -> str:
    """A JSON list with a line for each token: of a long prompt no thread holds the others up for all."""
    return f"[{LINE.join(json.dumps(entry and entry._asdict()) for entry in logprobs)}]"


def as_json(logprobs: list[Logprob]) -> str:
    """In parts: each call holds Python's lock, for which the engine's thread waits, until it returns."""
    parts = [
        json.dumps([logprob._asdict() for logprob in logprobs[first : first + AT_ONCE]])[1:-1]
        for first in range(0, len(logprobs), AT_ONCE)
    ]
    return f"[{', '.join(parts)}]"


def string_tensor(name: str, texts: list[str]) -> ResponseTensor:
    return ResponseTensor(name, np.array([text.encode() for text in texts], dtype=np.object_))


def int_tensor(name: str, values: list[int]) -> ResponseTensor:
    return ResponseTensor(name, np.array(values, dtype=np.int32))


def float_tensor(name: str, values: list[float]) -> ResponseTensor:
    return ResponseTensor(name, np.array(values, dtype=np.float32))
