"""Prefixes between two LLMs: who computed a prompt is not to be seen in the answer."""

import argparse
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from hemiola import LLM, Failed, Refused, SamplingParams
from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.schedule.inbox import Inbox

MODELS = ["nemotron-h-code", "qwen3.5-code"]
HOST = {"host_cache_bytes": 2**24}
FIRST = SamplingParams(max_tokens=1)
ANSWER = SamplingParams(max_tokens=24, logprobs=2, ignore_eos=True)


@pytest.mark.parametrize("model", MODELS)
def test_one_engine_computes_the_prompt_and_another_decodes(
    bundled: Callable[[str], Path], model: str
) -> None:
    """While it decodes others; then the conversation moves back, and goes on there."""
    engine_dir, drafts = bundled(model), {"drafts": "mtp", "adaptive_drafts": False}
    with LLM(engine_dir, drafts="none", prefix_cache=False) as plain:
        ids = plain.encode(Path(argparse.__file__).read_text()[:3000])[:400]
        other = ids[50:90]
        wanted = plain.generate([ids, other], ANSWER)
        longer = [*ids, *wanted[0].token_ids, *other]
        wanted_next = plain.generate([longer], ANSWER)[0]
    with LLM(engine_dir, **HOST, **drafts) as one, LLM(engine_dir, **HOST, **drafts) as two:
        one.generate([ids], FIRST)
        packed = one.export_prefix(ids)
        ended = threading.Event()
        pieces = []

        def on_piece(piece: object) -> None:
            pieces.append(piece)
            if piece.finish_reason is not None:
                ended.set()

        two.submit(other, ANSWER, on_piece)
        assert two.import_prefix(packed) == 384
        out = two.generate([ids], ANSWER)[0]
        assert out.metrics.cached_tokens == 384 and sum(out.metrics.drafted) > 0
        assert (out.token_ids, out.logprobs) == (wanted[0].token_ids, wanted[0].logprobs)
        assert ended.wait(60)
        assert [token for piece in pieces for token in piece.token_ids] == wanted[1].token_ids
        text = [*ids, *out.token_ids]
        assert one.import_prefix(two.export_prefix(text)) in (384, 384 + 64 * ((len(text) - 384) // 64))
        out = one.generate([longer], ANSWER)[0]
        assert (out.token_ids, out.logprobs) == (wanted_next.token_ids, wanted_next.logprobs)
        assert out.metrics.cached_tokens >= 384


def test_a_prefix_in_the_file_is_read_to_be_packed(engine_dir: Path, tmp_path: Path) -> None:
    options = HOST | {"disk_cache_dir": str(tmp_path), "disk_cache_bytes": 2**24}
    prompt, found = list(range(2, 100)), []
    for _ in range(2):
        with LLM(engine_dir, **options) as llm:
            if not found:
                llm.generate([prompt], FIRST)
            found.append(llm.export_prefix(prompt))
    assert found[0] == found[1]


def test_who_cannot_move_prefixes_says_so(engine_dir: Path) -> None:
    prompt = list(range(2, 100))
    with LLM(engine_dir) as llm:
        for asked in (lambda: llm.export_prefix(prompt), lambda: llm.import_prefix(b"")):
            with pytest.raises(Refused, match="_prefix needs host_cache_bytes") as refused:
                asked()
            assert refused.value.code == "conflict"


def test_bad_calls_are_refused_and_the_engine_goes_on(engine_dir: Path) -> None:
    prompt = list(range(2, 100))
    with LLM(engine_dir, **HOST) as llm:
        llm.generate([prompt], FIRST)
        packed = llm.export_prefix(prompt)
        said: list[Exception] = []
        done = threading.Event()

        def on_piece(piece: object) -> None:
            try:
                llm.import_prefix(packed)
            except Refused as error:
                said.append(error)
            done.set()

        llm.submit(prompt, FIRST, on_piece)
        assert done.wait(60) and "call this from another thread" in str(said[0])
        bad = [([], ""), ([10**6], ""), (prompt * 10, ""), (prompt, 7), (prompt, "x" * 2000), (b"ids", "")]
        for ids, salt in bad:
            with pytest.raises(Refused):
                llm.export_prefix(ids, cache_salt=salt)
        assert llm.import_prefix(memoryview(packed)) == llm.import_prefix(bytes(packed)) == 96
        assert llm.generate([prompt], FIRST)[0].metrics.cached_tokens == 96
    with pytest.raises(Refused, match="closed"):
        llm.import_prefix(packed)


@pytest.mark.parametrize("asked", ["export_prefix", "import_prefix"])
def test_units_that_are_lent_when_somebody_presses_ctrl_c_stay_lent(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    prompt = list(range(2, 100))
    with LLM(engine_dir, **HOST) as llm:
        llm.generate([prompt], FIRST)
        packed, host = llm.export_prefix(prompt), llm._loop.scheduler.prefix.host
        given = {"export_prefix": (prompt,), "import_prefix": (packed,)}[asked]
        for begins, number in itertools.product([False, True], (1, 2)):
            llm.reset_prefix_cache()
            llm.generate([prompt], FIRST)
            with monkeypatch.context() as patch:
                look = interrupted(llm._loop._inbox, begins, number + (asked == "export_prefix"))
                patch.setattr(llm._loop._inbox, "look", look)
                with pytest.raises(KeyboardInterrupt):
                    getattr(llm, asked)(*given)
            assert not llm._loop.visit(lambda prefix: dict(host._lent)), (begins, number)
            llm._loop.visit(lambda prefix: prefix.audit())


def interrupted(inbox: Inbox, begins: bool, number: int) -> Callable[[Callable], Future]:
    """Somebody who waits for the look of this number presses Ctrl-C; it begins before that, or not."""
    look, calls = inbox.look, itertools.count(1)

    def look_and_press(act: Callable) -> Future:
        if next(calls) != number:
            return look(act)
        begun, goes_on = threading.Event(), threading.Event()

        def act_slowly(prefix: PrefixCache) -> object:
            begun.set()
            assert goes_on.wait(60)
            return act(prefix)

        if not begins:
            look(lambda prefix: goes_on.wait(60))
        future = look(act_slowly)

        def press() -> None:
            assert not begins or begun.wait(60)
            threading.Timer(0.1, goes_on.set).start()
            raise KeyboardInterrupt

        future.result = press
        return future

    return look_and_press


def test_a_look_that_fails_ends_the_engine_and_everybody_hears_of_it(engine_dir: Path) -> None:
    with LLM(engine_dir, **HOST) as llm:
        inbox = llm._loop._inbox
        first = inbox.look(lambda prefix: 1 // 0)
        with pytest.raises(Failed):
            inbox.look(lambda prefix: 1).result(60)
        with pytest.raises(ZeroDivisionError):
            first.result(60)
        with pytest.raises(Failed):
            llm.export_prefix([2, 3])
