"""Commands in this process; loops by hand, over the fake session and over real tiny engines."""

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest
from kit.engine_hand import DEVICE, NUM_DRAFTS, SMALL, EngineHand, Wanted, own_answer, right_and_wrong
from kit.fake_session import VOCAB, FakeSession, resolved
from kit.hand import Hand
from kit.plain import Plain
from kit.proposers import Scripted
from kit.stages import without_stages
from oracle import Oracle

from hemiola.builder.build import Options, build
from hemiola.runtime.cache.eviction import Cost
from hemiola.runtime.cli.main import main
from hemiola.runtime.open import make_loop
from hemiola.runtime.schedule.request import Bounds
from hemiola.runtime.text import Text

DEMO = Path(__file__).parents[2] / "demo"


class Ended(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def hemiola(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """A command in this process, as a shell sees it."""

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["hemiola", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code
        out, err = capsys.readouterr()
        return Ended(status, out, without_stages(err))

    return run


@pytest.fixture(scope="session")
def engine_dir(tiny_engine: Callable[..., Path]) -> Path:
    return tiny_engine("qwen3_5")


@pytest.fixture
def make_hand() -> Callable[..., Hand]:
    def make(
        text: Text | None = None,
        session: FakeSession | None = None,
        proposer: Scripted | None = None,
        hybrid: bool = True,
        **sizes: int | str,
    ) -> Hand:
        config = session.config if session is not None else resolved(**sizes)
        session = session or FakeSession(config, hybrid=hybrid)
        loop = make_loop(config, session, session, text, Cost(10, 40 if session.hybrid else 0))
        if proposer is not None:
            proposer.drive(loop.steps)
        return Hand(loop, Bounds(config.max_len, config.max_len, VOCAB, eos_ids=()))

    return make


@pytest.fixture(scope="session")
def oracle_answer(
    shared: Callable[..., Path], tiny_checkpoint: Callable[[str], Path]
) -> Callable[..., list[int]]:
    """(family, prompt, num_tokens, kv_dtype) -> the oracle's tokens, which one worker computes for all."""

    @cache
    def oracle(family: str, kv_dtype: str) -> Oracle:
        return Oracle(tiny_checkpoint(family), kv_dtype=kv_dtype)

    def get(family: str, prompt: list[int], num_tokens: int, kv_dtype: str = "auto") -> list[int]:
        def make(file: Path) -> None:
            ids = oracle(family, kv_dtype).generate(prompt, num_tokens).token_ids
            file.write_text(json.dumps(ids))

        key = ("oracle", family, kv_dtype, tuple(prompt), num_tokens)
        return json.loads(shared(key, "ids.json", make).read_text())

    return get


@pytest.fixture(scope="session")
def wanted(
    oracle_answer: Callable[..., list[int]],
    tiny_engine: Callable[..., Path],
    plain_runs: Callable[[Path], Plain],
) -> Wanted:
    """(family, prompt, num_tokens) -> the oracle's tokens; on a GPU the plain run's."""
    return Wanted(oracle_answer if DEVICE == "cpu" else partial(own_answer, tiny_engine, plain_runs))


@pytest.fixture(scope="session")
def plain_runs() -> Callable[[Path], Plain]:
    """engine directory -> its plain runs."""
    known: dict[Path, Plain] = {}

    def get(engine_dir: Path) -> Plain:
        if engine_dir not in known:
            known[engine_dir] = Plain(engine_dir)
        return known[engine_dir]

    return get


@pytest.fixture
def engine_hands(
    tiny_engine: Callable[..., Path],
    plain_runs: Callable[[Path], Plain],
    wanted: Wanted,
) -> Callable[..., EngineHand]:
    """(family, kind of drafts, options of the build, options of serving) -> a hand.

    Kind "scripted" takes a proposer, or proposes right and wrong windows of every length. Kind "mtp" may take
    one too: then the head runs, and the drafts come from there. "attention_only" is a control without any
    state in slots, unless an MTP head is asked for. Plain runs take whole texts in one step, and one compiled
    for fewer tokens has no kernels for that: theirs is an engine for 512.
    """

    def make(family: str, kind: str = "plain", built: dict | None = None, **options: object) -> EngineHand:
        built = {"max_step_tokens": 512} | (built or {})
        if family == "attention_only" and kind != "mtp":
            built["drafts"] = "ngram"  # a head would keep something per slot
        engine_dir = tiny_engine(family, **built)
        wide = tiny_engine(family, **built | {"max_step_tokens": max(512, built["max_step_tokens"])})
        if kind == "scripted" and "proposer" not in options:
            options["proposer"] = right_and_wrong(lambda ids, num: wanted(family, ids, num), seed=1)
        return EngineHand(engine_dir, plain_runs(wide), kind, **options)

    return make


@pytest.fixture
def small_hand(engine_hands: Callable[..., EngineHand]) -> Callable[..., EngineHand]:
    """(family, kind, options) -> a hand over an engine of the sizes SMALL, with NUM_DRAFTS drafts."""

    def make(family: str, kind: str = "plain", **options: object) -> EngineHand:
        if kind != "plain":
            options.setdefault("num_drafts", NUM_DRAFTS)
        return engine_hands(family, kind, SMALL, **options)

    return make


@pytest.fixture
def answers(wanted: Wanted) -> Callable[[str], Callable[[Sequence[int], int], list[int]]]:
    """family -> what the oracle says to a prompt."""
    return lambda family: lambda ids, num: wanted(family, ids, num)


@pytest.fixture(scope="session")
def bundled(shared: Callable[..., Path]) -> Callable[[str], Path]:
    """A checkpoint of demo/ -> its engine."""
    options = Options(max_len=512, max_rows=4, max_step_tokens=256)
    return lambda model: shared(("bundled", model), model, lambda to: build(DEMO / model, to, options))
