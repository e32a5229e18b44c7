"""Pieces from a request's ids, without a loop."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer, decoders, models

from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.schedule import outbox as outboxes
from hemiola.runtime.schedule.outbox import Outbox
from hemiola.runtime.schedule.request import Bounds, Request, new_request
from hemiola.runtime.text import Text

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    """A token for every letter."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(ALPHABET)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return Outbox(Text(tmp_path))


def opened(outbox: Outbox, wants_text: bool = True, **params: object) -> Request:
    bounds = Bounds(max_len=90, built_max_len=90, vocab_size=26, eos_ids=())
    request = new_request(1, [0, 1], SamplingParams(max_tokens=50, **params), bounds, wants_text=wants_text)
    outbox.open(outbox.letter(request, lambda piece: None))
    return request


def say(outbox: Outbox, request: Request, letters: str) -> Piece:
    """A step's tokens."""
    request.append([ALPHABET.index(letter) for letter in letters])
    return outbox.end(request).piece


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_a_ctrl_c_of_who_submits_is_taken_for_a_fault_of_the_tokenizer(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    monkeypatch.setattr(outboxes, "Growing", Mock(side_effect=end))
    with pytest.raises(end):
        opened(outbox)


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


def test_a_steps_several_tokens_share_its_time(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean is over all tokens after the first, not over steps."""
    now = [5.0]
    monkeypatch.setattr("hemiola.runtime.schedule.outbox.time", SimpleNamespace(perf_counter=lambda: now[0]))
    request = opened(outbox)
    said = []
    for letters, seconds in (("a", 0.0), ("bcde", 2.0), ("", 7.0), ("fgh", 1.5)):
        now[0] += seconds
        said += say(outbox, request, letters).token_ids
    metrics = request.metrics
    assert (metrics.first_token, metrics.last_token, metrics.num_output_tokens) == (5.0, 15.5, 8)
    assert metrics.time_per_output_token == pytest.approx(10.5 / 7)
    assert len(said) == 8


def test_the_first_steps_several_tokens_have_one_time(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a preemption, or where prompt lookup drafted at once: what follows is divided by all of them."""
    now = [1.0]
    monkeypatch.setattr("hemiola.runtime.schedule.outbox.time", SimpleNamespace(perf_counter=lambda: now[0]))
    request = opened(outbox, stop="xy")
    say(outbox, request, "abc")
    now[0] = 2.0
    piece = say(outbox, request, "dxyz")
    assert piece.finish_reason == "stop" and piece.metrics is request.metrics
    assert request.metrics.num_output_tokens == 6, "tokens behind a stop string are none"
    assert request.metrics.time_per_output_token == pytest.approx(1 / 5)


@pytest.mark.parametrize(("stop", "ids"), [((), [23, 24, 25, 23]), (("yz",), [23, 24, 25])])
def test_who_wants_no_text_has_no_part_of_it_made_and_is_stopped_all_the_same(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...], ids: list[int]
) -> None:
    if not stop:
        monkeypatch.setattr(Text, "decode", Mock(side_effect=AssertionError))
    request = opened(outbox, wants_text=False, stop=stop)
    piece = say(outbox, request, "xyzx")
    assert (piece.token_ids, piece.error) == (ids, None)
    assert piece.finish_reason == ("stop" if stop else None)
