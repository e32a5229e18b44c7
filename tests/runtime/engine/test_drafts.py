"""Windows are counted and cut as they must be; that no draft changes a token: test_storms.py."""

import pytest
from kit.fake_session import VOCAB, hashed, oracle
from kit.proposers import Scripted, always_right


def hand(make, proposer, **sizes):
    return make(proposer=proposer, **{"num_drafts": 3} | sizes)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_at_most_more_drafts_than_the_engine_makes_is_refused(make_hand, num_drafts: int) -> None:
    h = hand(make_hand, always_right(hashed), num_drafts=num_drafts)
    asked = [h.submit([1, 2], max_tokens=9, num_drafts=most) for most in (num_drafts + 1, 2**31 - 1)]
    h.run()
    assert [h.token_ids(r) for r in asked] == [oracle([1, 2], 9)] * 2
    assert all(len(h.last(r).metrics.drafted) <= num_drafts for r in asked)


def test_windows_are_counted_by_position(make_hand) -> None:
    right = always_right(hashed)
    h = hand(make_hand, Scripted(lambda r, room: [*right.script(r, room)[:1], VOCAB - 1, VOCAB - 1][:room]))
    asked = h.submit([1, 2], max_tokens=9)
    h.run()
    metrics = h.last(asked).metrics
    assert metrics.accepted[0] == metrics.drafted[0] >= 3
    assert sum(metrics.accepted) + 1 + len(metrics.drafted) <= 9 + 3
    assert sum(metrics.accepted[1:]) <= 1  # VOCAB - 1 may be right by chance


def test_a_window_never_outgrows_the_request(make_hand) -> None:
    """M11: near max_len and max_tokens a window is cut, down to nothing."""
    rooms = []
    right = always_right(hashed)

    def script(request, room):
        rooms.append((request.limit - request.total_len, room))
        return right.script(request, room)

    h = hand(make_hand, Scripted(script), num_drafts=5)
    asked = [h.submit([1] * n, max_tokens=100) for n in (57, 60, 62, 63)]
    h.run()
    assert [len(h.token_ids(r)) for r in asked] == [7, 4, 2, 1]
    assert all(room == min(5, left - 1) for left, room in rooms) and rooms


@pytest.mark.parametrize("at", range(4))
def test_nothing_behind_a_stop_token_is_kept(make_hand, at: int) -> None:
    """M9: a stop at each index of a window of right drafts."""
    h = hand(make_hand, always_right(hashed))
    expected = oracle([3, 4], 12)
    stop = expected[4 + at]
    first = expected.index(stop)
    asked = h.submit([3, 4], max_tokens=12, stop_token_ids=[stop], logprobs=1)
    h.run()
    assert h.token_ids(asked) == expected[: first + 1]
    assert h.last(asked).finish_reason == "stop"
    logprobs = [line for piece in h.pieces[asked] for line in piece.logprobs or []]
    assert [line.token_id for line in logprobs] == expected[: first + 1]
