"""The loop's thread: pieces, aborts, ends and failures, with the checking fake session for an engine."""

import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit.fake_session import VOCAB, FakeSession, hashed, oracle, resolved
from kit.frames import kept_by
from kit.guided import EOS, compiled
from kit.proposers import always_right
from kit.served import until
from tokenizers import Tokenizer, decoders, models

from hemiola.plugins.rows import live_rows
from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.cache.eviction import Cost
from hemiola.runtime.cache.tree import Entry
from hemiola.runtime.errors import Failed, Refused
from hemiola.runtime.open import make_loop
from hemiola.runtime.running_time import RunningTime
from hemiola.runtime.schedule import loop
from hemiola.runtime.schedule.plan import Plan
from hemiola.runtime.schedule.request import Bounds, new_request
from hemiola.runtime.step.program import Batch
from hemiola.runtime.text import Growing, Text


@pytest.fixture
def letters(tmp_path: Path) -> Text:
    """One character per token: chr(65 + id)."""
    tokenizer = Tokenizer(models.WordLevel({chr(65 + i): i for i in range(VOCAB)}, unk_token="A"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return Text(tmp_path)


def spell(ids: list[int]) -> str:
    return "".join(chr(65 + i) for i in ids)


class Running:
    """A started loop and its fake session."""

    def __init__(self, **sizes: int) -> None:
        self.session = FakeSession(resolved(**sizes))
        self.loop = make_loop(self.session.config, self.session, self.session, None, Cost(10, 40))
        self.loop.start()
        self.request_ids = itertools.count(1)

    def submit(
        self, prompt: list[int], on_piece: Callable[[Piece], None] | None = None, **params: object
    ) -> tuple[int, list[Piece], threading.Event]:
        request_id = next(self.request_ids)
        bounds = Bounds(self.session.config.max_len, self.session.config.max_len, VOCAB, ())
        request = new_request(request_id, prompt, SamplingParams(**params), bounds)
        pieces: list[Piece] = []
        ended = threading.Event()

        def take(piece: Piece) -> None:
            pieces.append(piece)
            if piece.finish_reason is not None:
                ended.set()
            if on_piece is not None:
                on_piece(piece)

        self.loop.submit(request, take)
        return request.id, pieces, ended


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.loop.close()
    assert not made.loop._thread.is_alive()


def ids_of(pieces: list[Piece]) -> list[int]:
    return [token_id for piece in pieces for token_id in piece.token_ids]


def test_pieces_arrive_token_by_token(running: Running) -> None:
    _, pieces, ended = running.submit([5, 6, 7], max_tokens=9)
    assert ended.wait(60)
    assert ids_of(pieces) == oracle([5, 6, 7], 9)
    assert [piece.finish_reason for piece in pieces] == [None] * 8 + ["length"]
    metrics = pieces[-1].metrics
    assert metrics is not None and all(piece.metrics is None for piece in pieces[:-1])
    assert metrics.arrival <= metrics.first_scheduled <= metrics.first_token < metrics.last_token
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens, metrics.cached_tokens) == (3, 9, 0)


def test_many_threads_submit_and_abort(running: Running) -> None:
    outcomes: list[str] = []

    def user(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(6):
            prompt = dice.choices(range(VOCAB), k=dice.randint(1, 30))
            request_id, pieces, ended = running.submit(prompt, max_tokens=dice.randint(1, 30))
            if dice.random() < 0.3:
                running.loop.abort(request_id)
            assert ended.wait(60)
            right = ids_of(pieces) == oracle(prompt, len(ids_of(pieces)))
            outcomes.append(str(pieces[-1].finish_reason) if right else "wrong")

    users = [threading.Thread(target=user, args=(seed,)) for seed in range(5)]
    for thread in users:
        thread.start()
    for thread in users:
        thread.join(60)
    assert len(outcomes) == 30 and set(outcomes) <= {"length", "cancelled"} and "length" in outcomes


def test_abort_of_what_ended_or_never_was_is_nothing(running: Running) -> None:
    request_id, pieces, ended = running.submit([1], max_tokens=1)
    assert ended.wait(60)
    running.loop.abort(request_id)
    running.loop.abort(12345)
    _, pieces, ended = running.submit([2], max_tokens=2)
    assert ended.wait(60) and ids_of(pieces) == oracle([2], 2)


@pytest.mark.parametrize("error", [RuntimeError("user code"), SystemExit(1)], ids=["raises", "exits"])
def test_a_callback_that_raises_loses_its_request_only(running: Running, error: BaseException) -> None:
    def bad(piece: Piece) -> None:
        raise error

    _, lost, _ = running.submit([3, 4], bad, max_tokens=40)
    _, pieces, ended = running.submit([5, 6, 7], max_tokens=40)
    assert ended.wait(60)
    assert len(lost) == 1
    running.loop.close()
    with pytest.raises(Refused, match="the engine is closed"):  # and not: failed
        running.submit([1])
    assert ids_of(pieces) == oracle([5, 6, 7], 40)


def test_an_engine_failure_ends_every_request_with_the_reason(running: Running) -> None:
    gate = threading.Event()

    def fail(batch: Batch) -> None:
        gate.wait(60)
        if any(row.committed > 5 for row in live_rows(batch.rows, 4)):
            raise RuntimeError("out of cheese")

    running.session.before_run = fail
    ends = [running.submit([1, 2, 3], max_tokens=30) for _ in range(6)]  # 4 run, 2 wait
    gate.set()
    for _, pieces, ended in ends:
        assert ended.wait(60)
        assert pieces[-1].finish_reason == "error"
        assert pieces[-1].error == "the engine failed: RuntimeError: out of cheese"
        assert pieces[-1].metrics is not None
        assert ids_of(pieces) == oracle([1, 2, 3], len(ids_of(pieces)))
    with pytest.raises(Failed, match=r"the engine failed \(RuntimeError: out of cheese\) and takes no more"):
        running.submit([1])


def test_an_answer_that_is_whole_when_the_engine_fails_waits_for_its_end_for_ever(running: Running) -> None:
    """Its last piece has been made, and had not left."""

    def fails(plan: Plan) -> None:
        if any(row.request.finish_reason is not None for row in plan.rows):
            raise ZeroDivisionError("sabotaged")

    gate = threading.Event()
    running.loop.scheduler.reap, running.session.before_run = fails, lambda batch: gate.wait(60)
    whole, cut = (running.submit([5, 6, 7], max_tokens=num) for num in (3, 60))
    gate.set()
    for _, _, ended in (whole, cut):
        assert ended.wait(60)
    assert ids_of(whole[1]) == oracle([5, 6, 7], 3) and whole[1][-1].finish_reason == "length"
    assert ids_of(cut[1]) == oracle([5, 6, 7], 60)[: len(ids_of(cut[1]))]
    assert str(cut[1][-1].error) == "the engine failed: ZeroDivisionError: sabotaged"


def test_an_exit_in_the_loops_thread_is_a_failure(running: Running) -> None:
    running.session.before_run = lambda batch: sys.exit(3)
    _, pieces, ended = running.submit([1, 2, 3], max_tokens=30)
    assert ended.wait(60)
    assert pieces[-1].error == "the engine failed: SystemExit: 3"
    with pytest.raises(Failed, match="takes no more"):
        running.submit([1])


def test_a_long_step_is_no_stall_while_its_kernels_move(running: Running) -> None:
    gate, inside = threading.Event(), threading.Event()
    running.session.before_run = lambda batch: (inside.set(), gate.wait(60))
    running.loop._num_calls = lambda: num_calls
    num_calls = 1
    assert running.loop.load().stalled_s == 0, "it waits for work"
    _, _, ended = running.submit([1], max_tokens=1)
    assert inside.wait(60)
    time.sleep(0.1)
    num_calls = 2
    assert running.loop.load().stalled_s == 0
    time.sleep(0.1)
    assert running.loop.load().stalled_s >= 0.1, "nothing moves"
    clock = running.loop._now
    assert isinstance(clock, RunningTime)
    clock.wall = lambda: time.monotonic() + 3600  # a process that was stopped
    assert running.loop.load().stalled_s < 60
    gate.set()
    assert ended.wait(60)


def test_close_cancels_what_runs_and_refuses_what_comes() -> None:
    running = Running()

    def until_it_closes(batch: Batch) -> None:
        while running.loop._inbox._refusal is None:
            time.sleep(0.001)

    running.session.before_run = until_it_closes
    ends = [running.submit([1, 2, 3], max_tokens=60) for _ in range(6)]
    running.loop.close()
    assert all(pieces[-1].finish_reason == "cancelled" for _, pieces, _ in ends)
    with pytest.raises(Refused, match="the engine is closed"):
        running.submit([1])
    running.loop.close()
    running.loop.scheduler.audit()


@pytest.mark.parametrize("failed", [False, True])
def test_a_closed_engine_keeps_all_that_callers_had_whom_it_refused(failed: bool) -> None:
    """One error told everybody, and kept everybody's frames: prompts, messages, callbacks."""
    running = Running()
    if failed:
        running.loop.lose(Failed("a rank is lost"))
        running.loop._thread.join(60)
    running.loop.close()
    for call in (running.loop.check_open, lambda: running.submit([1]), lambda: running.loop.visit(id)):
        assert kept_by(call) == 0


def test_an_on_piece_may_close(running: Running) -> None:
    _, pieces, ended = running.submit([1, 2], lambda piece: running.loop.close(), max_tokens=40)
    assert ended.wait(60) and pieces[-1].finish_reason == "cancelled"
    running.loop._thread.join(60)
    assert not running.loop._thread.is_alive()


def test_close_with_drain_finishes_what_there_is() -> None:
    running = Running()
    ends = [running.submit([1, 2, 3], max_tokens=20) for _ in range(6)]
    running.loop.close(drain=True)
    assert all(ids_of(pieces) == oracle([1, 2, 3], 20) for _, pieces, _ in ends)


@pytest.mark.parametrize("when", ["at once", "later"])
def test_an_observer_that_raises_ends_the_engine(when: str, caplog: pytest.LogCaptureFixture) -> None:
    """It was called in the loop's thread, between two steps; on_piece cost no more than its own request."""
    running, heard = Running(prefix_cache=True), []
    prompt = [1] * (3 * running.session.config.page_len)

    class Raises:
        def stored(self, path: Sequence[Entry]) -> None:
            heard.append(len(path))
            raise SystemExit("the user's")

        def removed(self, path: Sequence[Entry]) -> None:
            heard.append(-len(path))

    def watch() -> None:
        running.loop.watch(Raises())

    for act in (watch, None) if when == "later" else (None, watch):
        _, pieces, ended = running.submit(prompt, max_tokens=3)
        assert ended.wait(60) and ids_of(pieces) == oracle(prompt, 3)
        if act is not None:
            act()
        prompt = [2, *prompt]
    _, pieces, ended = running.submit(prompt, max_tokens=3)
    assert ended.wait(60) and ids_of(pieces) == oracle(prompt, 3)
    running.loop.flush()
    running.loop.close()
    assert len(heard) == 1 and "is not called again" in caplog.text


def test_an_observer_that_lacks_a_method_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """Where it was looked up, nothing was caught."""

    class Half:
        def removed(self, path: Sequence[Entry]) -> None: ...

    running = Running(prefix_cache=True)
    running.loop.watch(Half())  # type: ignore[arg-type]
    prompt = [1] * (3 * running.session.config.page_len)
    for _ in range(2):
        _, pieces, ended = running.submit(prompt, max_tokens=3)
        assert ended.wait(60) and ids_of(pieces) == oracle(prompt, 3)
    running.loop.close()
    assert "is not called again" in caplog.text


def test_an_idle_loop_audits_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hemiola.runtime.schedule.loop.IDLE_SECONDS", 0.01)
    running = Running()
    running.loop.scheduler.prefix.pages._free.pop()
    running.loop._thread.join(60)
    with pytest.raises(Failed, match="pages lost"):
        running.submit([1])


def test_a_request_after_a_pause_waits_for_the_audit_of_a_large_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A million pages on a disk took 7 seconds, in which nobody was served."""
    monkeypatch.setattr(loop, "MOST_AUDITED", 2)
    monkeypatch.setattr(loop, "IDLE_SECONDS", 0.01)
    running, looks = Running(prefix_cache=True), []
    idle = running.loop._idle

    def look() -> bool:
        audits = []
        running.loop.audit = lambda: audits.append(True)
        idle()
        looks.append((running.loop.scheduler.prefix.num_entries > 2, bool(audits)))
        return True

    running.loop._idle = look
    for length in (1, 5 * running.session.config.page_len):
        _, _, ended = running.submit([1] * length, max_tokens=1)
        assert ended.wait(60)
        seen = len(looks)
        until(lambda seen=seen: len(looks) > seen + 1)
    running.loop.close()
    assert set(looks) == {(False, True), (True, False)}


def test_counters(running: Running) -> None:
    _, _, ended = running.submit([1] * 40, max_tokens=5)
    assert ended.wait(60)
    running.loop.close(drain=True)
    counters = running.loop.counters
    assert (counters.num_steps, counters.num_computed_tokens, counters.num_output_tokens) == (6, 44, 5)
    assert counters.num_finished == 1 and counters.engine_seconds > 0
    assert counters.engine_seconds < counters.device_seconds < counters.step_seconds


def test_the_pace_counts_no_time_in_which_other_processes_had_the_core(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a busy machine makes drafts look dear at random, and an engine may stop drafting for long."""
    pace, timed, now = running.loop.scheduler.pace, [], {"wall": 0.0, "own": 0.0}
    clock = {name: lambda: now["wall"] for name in ("perf_counter", "monotonic")}
    monkeypatch.setattr(loop, "time", SimpleNamespace(**clock, thread_time=lambda: now["own"]))
    marked = lambda times, place: times.__setitem__(place, int(1e9 * now["wall"]))  # noqa: E731
    monkeypatch.setattr(running.loop.steps.ops, "mark", marked)
    monkeypatch.setattr(pace, "adaptive", True)
    monkeypatch.setattr(pace, "timed", lambda *told: timed.append(told[-2:]))
    running.session.before_run = lambda batch: now.update(wall=now["wall"] + 8.0, own=now["own"] + 0.5)
    _, _, ended = running.submit([1, 2], max_tokens=4)
    assert ended.wait(60)
    assert timed == [(0.5, 0.0)] * 3


def test_stop_strings_across_steps(make_hand: Callable, letters: Text) -> None:
    whole = oracle([1, 2], 20)
    hand = make_hand(letters)
    ids = {
        end: hand.submit([1, 2], max_tokens=20, stop=[spell(whole[end - 3 : end])]) for end in range(3, 21)
    }
    plain = hand.submit([1, 2], max_tokens=20)
    hand.run()
    assert hand.text(plain) == spell(whole)
    for end, request_id in ids.items():
        at = spell(whole).index(spell(whole[end - 3 : end]))
        assert hand.text(request_id) == spell(whole)[:at]
        assert hand.token_ids(request_id) == whole[: at + 3], "the tokens of the stop string are kept"
        assert hand.last(request_id).finish_reason == "stop"


def test_a_stop_string_that_did_not_come_is_let_go_at_the_end(make_hand: Callable, letters: Text) -> None:
    whole = oracle([1, 2], 6)
    hand = make_hand(letters)
    request_id = hand.submit([1, 2], max_tokens=6, stop=[spell(whole[4:6]) + "!!"])
    hand.run()
    assert hand.text(request_id) == spell(whole) and hand.last(request_id).finish_reason == "length"


def test_the_end_token_is_no_text(make_hand: Callable, letters: Text) -> None:
    whole = oracle([1, 2], 6)
    hand = make_hand(letters)
    request_id = hand.submit([1, 2], max_tokens=6, stop_token_ids=[whole[3]])
    hand.run()
    end = whole.index(whole[3])
    assert hand.text(request_id) == spell(whole[:end]) and hand.token_ids(request_id) == whole[: end + 1]


def test_logprobs_come_with_their_tokens(make_hand: Callable) -> None:
    hand = make_hand(num_pages=9, max_step_tokens=5)  # preempts, too
    asking = [hand.submit([1, 2, 3 + i], max_tokens=30, logprobs=2) for i in range(3)]
    silent = hand.submit([1, 2], max_tokens=4)
    hand.run()
    assert hand.loop.scheduler.num_preemptions > 0
    for request_id in asking:
        for piece in hand.pieces[request_id]:
            assert [entry.token_id for entry in piece.logprobs or []] == piece.token_ids
            assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in piece.logprobs or [])
    assert all(piece.logprobs is None for piece in hand.pieces[silent])


def test_a_stop_string_before_nan_in_one_window_is_a_stop(make_hand: Callable, letters: Text) -> None:
    whole = oracle([1, 2], 9)

    def next_token(context: list[int]) -> int | None:
        return hashed(context) if len(context) < 8 else None

    session = FakeSession(resolved(num_drafts=9), next_token)
    hand = make_hand(letters, session=session, proposer=always_right(hashed))
    asked = hand.submit([1, 2], max_tokens=20, stop=[spell(whole[3:5])])
    hand.run()
    assert (hand.last(asked).finish_reason, hand.last(asked).error) == ("stop", None)
    assert hand.token_ids(asked) == whole[:5]


def test_the_loop_reads_what_another_engine_said_while_all_others_wait(
    make_hand: Callable, letters: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred thousand tokens take a second: who submits them reads them."""
    hand, output, push = make_hand(letters), oracle([1, 2], 20), Growing.push
    read: list[int] = []
    monkeypatch.setattr(
        Growing, "push", lambda own, token_id, **how: [read.append(token_id), push(own, token_id, **how)][1]
    )
    request_id = hand.submit([1, 2], max_tokens=20, output_ids=output[:18])
    assert read == output[:18]
    hand.run()
    assert read == output and hand.text(request_id) == spell(output[18:])


def test_a_tokenizer_that_raises_ends_its_request_only(make_hand: Callable, letters: Text) -> None:
    hand = make_hand(letters)
    good, bad = hand.submit([1, 2], max_tokens=9), hand.submit([3, 4], max_tokens=9)
    hand.turn()
    growing = hand.loop.outbox._letters[bad].growing
    growing.push = lambda token_id, may_stop: 1 / 0
    hand.run()
    assert hand.text(good) == spell(oracle([1, 2], 9))
    assert hand.last(bad).finish_reason == "error" and "ZeroDivisionError" in str(hand.last(bad).error)


def test_a_tokenizer_that_raises_on_a_prompt_ends_its_request_only(
    make_hand: Callable, letters: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the engine, whose thread decoded the end of each prompt."""
    hand, decode = make_hand(letters), letters.decode
    monkeypatch.setattr(letters, "decode", lambda ids: 1 // 0 if ids == [3, 4] else decode(ids))
    good, bad = hand.submit([1, 2], max_tokens=9), hand.submit([3, 4], max_tokens=9)
    hand.run()
    assert hand.text(good) == spell(oracle([1, 2], 9))
    assert hand.last(bad).finish_reason == "error" and "ZeroDivisionError" in str(hand.last(bad).error)
    assert hand.token_ids(bad) == []


def test_a_grammar_library_that_raises_ends_its_request_only(make_hand: Callable) -> None:
    hand = make_hand()
    grammar = {"grammar": compiled("a*b"), "stop_token_ids": [EOS]}
    good, bad = hand.submit([1, 2], max_tokens=9), hand.submit([3, 4], **grammar, max_tokens=9)
    hand.requests[bad - 1].guide.follow = lambda ids, drafts: 1 // 0
    hand.run()
    assert hand.token_ids(good) == oracle([1, 2], 9)
    assert hand.last(bad).finish_reason == "error"
    assert str(hand.last(bad).error).startswith("structured_outputs: ZeroDivisionError")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_cancels_reach_requests_that_wait_behind_others(make_hand: Callable, depth: int) -> None:
    """One that waits for a row, one that came in the same turn, and one ahead of a request that then runs."""
    hand = make_hand(max_rows=1, pipeline_depth=depth)
    runs, waits = hand.submit([1, 2], max_tokens=20), hand.submit([3, 4], max_tokens=9)
    hand.turn()
    unread, last = hand.submit([5, 6], max_tokens=9), hand.submit([7, 8], max_tokens=9)
    for request_id in (unread, waits):
        hand.loop.abort(request_id)
    hand.turn()
    for request_id in (waits, unread):
        (piece,) = hand.pieces[request_id]
        assert (piece.finish_reason, piece.token_ids) == ("cancelled", [])
        assert piece.metrics is not None
        assert piece.metrics.first_scheduled == piece.metrics.time_to_first_token == 0.0
    assert not hand.ended(runs) and hand.loop.load().num_waiting == 1
    hand.run()
    assert [hand.token_ids(i) for i in (runs, last)] == [oracle([1, 2], 20), oracle([7, 8], 9)]


def test_who_comes_again_while_messages_are_read_keeps_all_others_waiting(make_hand: Callable) -> None:
    """An on_piece that tries again, and is cancelled again."""
    hand, comes = make_hand(), []

    def again(piece: Piece) -> None:
        comes.append(piece)
        if len(comes) < 999:
            hand.loop.abort(hand.submit([3, 4], on_piece=again))

    beside = hand.submit([1, 2], max_tokens=5)
    hand.loop.abort(hand.submit([3, 4], on_piece=again))
    for _ in range(5):
        hand.turn()
    assert hand.ended(beside) and 1 < len(comes) < 9


def test_a_preempted_request_that_waits_is_cancelled_with_what_it_said(make_hand: Callable) -> None:
    hand = make_hand(max_rows=1)
    worse = hand.submit([1, 2], max_tokens=20, priority=1)
    for _ in range(5):
        hand.turn()
    hand.submit([3, 4], max_tokens=9)
    hand.turn()
    assert hand.requests[worse - 1].slot_id == 0
    hand.loop.abort(worse)
    hand.turn()
    assert hand.last(worse).finish_reason == "cancelled" and hand.token_ids(worse) == oracle([1, 2], 6)
    hand.run()
