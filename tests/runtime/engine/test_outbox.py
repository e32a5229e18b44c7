"""Pieces from a request's ids, without a loop."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.engine.outbox import Outbox
from hemiola.runtime.engine.request import Bounds, Request, new_request
from hemiola.runtime.text import Text

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    """A token for every letter."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(ALPHABET)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return Outbox(Text(tmp_path))


def opened(outbox: Outbox, **params: object) -> Request:
    bounds = Bounds(max_len=90, built_max_len=90, vocab_size=26, eos_ids=())
    request = new_request(1, [0, 1], SamplingParams(max_tokens=50, **params), bounds)
    outbox.open(request, lambda piece: None)
    return request


def say(outbox: Outbox, request: Request, letters: str) -> Piece:
    """A step's tokens."""
    request.append([ALPHABET.index(letter) for letter in letters])
    return outbox.end(request).piece


@pytest.mark.parametrize("steps", [["xyzxyzq"], list("xyzxyzq"), ["xyz", "xyzq"], ["xyzxy", "zq"]])
def test_a_stop_string_within_min_tokens_is_text(outbox: Outbox, steps: list[str]) -> None:
    request = opened(outbox, stop=("yz", "zq"), min_tokens=3)
    text = ""
    for letters in steps:
        piece = say(outbox, request, letters)
        text += piece.text
        if piece.finish_reason:
            break
    assert (text, piece.finish_reason, request.total_len) == ("xyzx", "stop", 2 + 6)


def test_a_stop_string_that_ends_behind_min_tokens_stops(outbox: Outbox) -> None:
    for min_tokens, wanted in ((0, "xx"), (4, "xx"), (5, "xxy"), (6, "xxyy")):
        request = opened(outbox, stop="yyy", min_tokens=min_tokens)
        piece = say(outbox, request, "xxyyyyyyy")
        assert (piece.text, piece.finish_reason) == (wanted, "stop")


def test_a_stop_string_in_the_prompts_text_is_none(outbox: Outbox) -> None:
    assert say(outbox, opened(outbox, stop="ab"), "c").finish_reason is None
