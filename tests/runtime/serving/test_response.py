"""Responses of the Triton model, as tensors."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hemiola.runtime.api import Logprob, Piece
from hemiola.runtime.serving import response
from hemiola.runtime.serving.ask import FLAGS, Ask
from hemiola.runtime.serving.stream import Stream


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 1000])
def test_a_long_answers_logprobs_are_encoded_in_one_call(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """It held Python's lock for 0.8 s at 32,000 tokens, and the engine's thread waited."""
    calls: list[int] = []

    def dumps(value: Any) -> str:
        calls.append(len(value))
        return json.dumps(value)

    monkeypatch.setattr(response, "json", SimpleNamespace(dumps=dumps))
    logprobs = [Logprob(i, -i / 7, ((i, -i / 7), (i + 1, -5.25))) for i in range(num_tokens)]
    stream = Stream("x", None, Ask("a", None, dict(FLAGS), 1, 0.0, SimpleNamespace()), 0.0)  # pyright: ignore
    out = response.tensors(stream, [[Piece("a", [1], logprobs)]], over=False)
    found: dict[str, np.ndarray] = {tensor.name: tensor.values for tensor in out}
    assert found["logprobs"][0].decode() == json.dumps([logprob._asdict() for logprob in logprobs])
    assert sum(calls) == num_tokens and max(calls) <= 64


def test_a_stream_repeats_its_prompt_with_each_piece() -> None:
    flags = FLAGS | {"exclude_input_in_output": False}
    stream = Stream("x", None, Ask("def ", None, flags, 1, 0.0, SimpleNamespace()), 0.0)  # pyright: ignore
    said = [response.tensors(stream, [[Piece(text, [1])]], over=False)[0] for text in "fg"]
    assert [tensor.values.tolist() for tensor in said] == [[b"def f"], [b"g"]]
