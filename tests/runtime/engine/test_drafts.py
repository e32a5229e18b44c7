"""Whatever is drafted, the output is the oracle's; and windows are counted and cut as they must be."""

import itertools
import random

import pytest
from kit.fake_session import VOCAB, hashed, oracle
from kit.proposers import Scripted, always_right, always_wrong, shuffled


def hand(make, proposer, **sizes):
    return make(proposer=proposer, **{"num_drafts": 3} | sizes)


PROPOSERS = {
    "always right": lambda: always_right(hashed),
    "always wrong": lambda: always_wrong(hashed, VOCAB),
    "random": lambda: shuffled(11, hashed, VOCAB),
    "none": lambda: Scripted(lambda request, room: []),
}


@pytest.mark.parametrize("num_drafts", [1, 3, 5, 20])
@pytest.mark.parametrize("name", PROPOSERS)
def test_no_draft_changes_a_token(make_hand, name: str, num_drafts: int) -> None:
    """Prompts around every edge (4) and page (8), in one batch; K beyond a chunk and beyond a page."""
    h = hand(make_hand, PROPOSERS[name](), num_drafts=num_drafts, max_rows=4, max_step_tokens=32)
    prompts = [list(range(1, 1 + n)) for n in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33)]
    asked = [h.submit(prompt, max_tokens=24) for prompt in prompts]
    h.run()
    assert [h.token_ids(r) for r in asked] == [oracle(prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("accepts", list(itertools.product(range(4), repeat=3)), ids=str)
def test_every_sequence_of_accepted_counts(make_hand, accepts: tuple[int, ...]) -> None:
    """M2 of the matrix: the state after any history of acceptance is the state of the text."""
    turns = itertools.cycle(accepts)
    right = always_right(hashed)

    def script(request, room):
        good = next(turns)
        ids = right.script(request, room)
        return [*ids[:good], *((t + 1) % VOCAB for t in ids[good:])]

    h = hand(make_hand, Scripted(script))
    asked = h.submit([5, 6, 7], max_tokens=30)
    h.run()
    assert h.token_ids(asked) == oracle([5, 6, 7], 30)


def test_a_step_without_drafts_after_accepted_drafts_reads_the_right_state(make_hand) -> None:
    """Report 004: windows [3, 0, 0, 2, 1, 0, 3] beside a row with others, all of them accepted."""
    lengths = {1: itertools.cycle([3, 0, 0, 2, 1, 0, 3]), 2: itertools.cycle([0, 3, 3, 0])}
    right = always_right(hashed)
    h = hand(make_hand, Scripted(lambda r, room: right.script(r, room)[: next(lengths[r.id])]))
    asked = [h.submit(prompt, max_tokens=40) for prompt in ([1, 2, 3], [9] * 6)]
    h.run()
    assert [h.token_ids(r) for r in asked] == [oracle([1, 2, 3], 40), oracle([9] * 6, 40)]


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


@pytest.mark.parametrize("seed", range(40))
def test_storms_of_drafts_preemptions_and_aborts(make_hand, seed: int) -> None:
    """Small pools, random arrivals, lengths, windows and aborts; audited after every turn."""
    rng = random.Random(seed)
    print("seed", seed)
    h = hand(
        make_hand,
        shuffled(seed, hashed, VOCAB),
        num_drafts=rng.choice([1, 3, 9]),
        max_rows=rng.randint(1, 5),
        max_step_tokens=rng.choice([8, 13, 32]),
        num_pages=rng.randint(9, 20),
    )
    wanted = {}
    for _ in range(60):
        if rng.random() < 0.3:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 50))]
            length = rng.randint(1, 20)
            wanted[h.submit(prompt, max_tokens=length)] = oracle(prompt, min(length, 64 - len(prompt)))
        if wanted and rng.random() < 0.05:
            h.loop.abort(rng.choice(list(wanted)))
        h.turn()
    h.run()
    for asked, expected in wanted.items():
        got = h.token_ids(asked)
        if h.last(asked).finish_reason == "cancelled":
            expected = expected[: len(got)]
        assert got == expected, f"seed {seed}, request {asked}"
