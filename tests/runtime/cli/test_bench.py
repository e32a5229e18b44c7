"""From arguments to exit status: on the real loop with a fake model, and once on a tiny engine."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.fake_session import VOCAB, FakeSession, hashed, resolved
from kit.stages import without_stages

from hemiola.runtime.api import OnPiece, SamplingParams
from hemiola.runtime.bench import bench
from hemiola.runtime.cache.eviction import Cost
from hemiola.runtime.cli import written
from hemiola.runtime.cli.bench import parse_variant
from hemiola.runtime.config import ServeConfig
from hemiola.runtime.errors import Refused
from hemiola.runtime.extra import install
from hemiola.runtime.llm import LLM
from hemiola.runtime.open import make_loop
from hemiola.runtime.schedule.request import Bounds

VLLM_KEYS = [
    "date", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration",
    "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls", "latencies",
    "start_times", "queue_times", "errors", "max_output_tokens_per_s", "max_concurrent_requests",
]  # fmt: skip
SPREADS = [
    f"{what}_{name}_ms"
    for name in ("ttft", "tpot", "itl", "e2el")
    for what in ("mean", "median", "std", "p99")
]


class FakeLLM(LLM):
    """An LLM on a FakeSession. `wrong`: for which options and length of context it answers otherwise."""

    opened: list[dict[str, object]]
    wrong: Callable[[dict[str, object], int], bool]
    before_run: Callable[[FakeSession], None]

    def __init__(self, engine_dir: Path, *, progress: bool, **options: object) -> None:
        self.opened.append(options)
        if options.get("cache_bytes") == 1:
            raise Refused("other", message="the cache may take 1 bytes")
        sizes = {
            name: value
            for name, value in options.items()
            if name in ("max_rows", "max_len", "max_step_tokens")
        }
        self.config = resolved(**{"max_len": 128, **sizes})

        def next_token(context: list[int]) -> int:
            return (hashed(context) + type(self).wrong(options, len(context))) % VOCAB

        def encode(text: str, max_len: int | None = None) -> list[int]:
            if max_len is not None and len(text) > 9 * max_len:
                raise Refused(
                    "other", message=f"prompt is {len(text)} characters"
                )  # a text to draw prompts from is no prompt
            return [ord(c) % VOCAB for c in text]

        session = FakeSession(self.config, next_token)
        session.before_run = lambda batch: type(self).before_run(session)
        self.manifest = SimpleNamespace(architecture="FakeForCausalLM", vocab_size=VOCAB)
        self._text = SimpleNamespace(encode=encode, encode_words=lambda text: [])
        self._grammars = None
        self._loop = make_loop(self.config, session, session, None, Cost(10, 40))
        self._request_ids = itertools.count(1)
        self._bounds = Bounds(self.config.max_len, self.config.max_len, VOCAB, eos_ids=())
        self._loop.start()
        self._pid = os.getpid()


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    fresh = {"opened": [], "wrong": lambda options, length: False, "before_run": lambda session: None}
    fake = type("Fresh", (FakeLLM,), fresh)
    monkeypatch.setattr(bench, "LLM", fake)
    monkeypatch.setattr(bench, "outline", SimpleNamespace(FILE="", parse=lambda path: None))  # there is none
    monkeypatch.setattr(bench, "resolve", resolved_without_manifest)
    return fake


def resolved_without_manifest(config: ServeConfig, found: None, free_bytes: int) -> SimpleNamespace:
    return SimpleNamespace(max_len=128 if config.max_len == "auto" else config.max_len)


@pytest.fixture
def bench_of(hemiola: Callable[..., Any]) -> Callable[..., Any]:
    """`hemiola bench ARGUMENTS`; arguments may be several words."""

    def run(*args: object, engine_dir: Path | str | None = "engine") -> Any:
        engine = () if engine_dir is None else ("--engine-dir", engine_dir)
        return hemiola("bench", *engine, *(word for arg in args for word in str(arg).split(" ")))

    return run


SMALL = "--num-requests 6 --input-len 20 --output-len 8"


def value(out: str, label: str) -> list[str]:
    [line] = [line for line in out.splitlines() if line.startswith(label)]
    return line[40:].split()


def test_table_json_and_check(llm: type[FakeLLM], bench_of: Callable[..., Any], tmp_path: Path) -> None:
    ended = bench_of(SMALL, "--check", "--concurrency", 2, "--seed", 3, "--json", tmp_path / "out.json")
    assert ended.status == 0, ended
    assert ended.out.startswith("============ Serving Benchmark Result ============\nSuccessful requests:  ")
    assert ended.out.endswith(f"{'=' * 50}\ntokens equal to the plain run: 6 of 6\n")
    assert value(ended.out, "Total input tokens:") == ["120"] and value(ended.out, "Total generated") == [
        "48"
    ]
    assert value(ended.out, "Peak concurrent requests:") == ["2"]
    assert "Speculative" not in ended.out and "warning: no draft can guess random tokens" in ended.err
    found = json.loads((tmp_path / "out.json").read_text())
    assert not {*VLLM_KEYS, *SPREADS} - set(found) and "compared" not in found
    assert found["request_rate"] == "inf" and found["max_concurrency"] == 2 and found["num_prompts"] == 6
    assert found["completed"] == 6 and found["options"]["seed"] == 3 and found["engine_options"] == {}
    assert found["tokens_equal"] == [
        {
            "statement": "tokens equal to the plain run: 6 of 6",
            "num_equal": 6,
            "num_compared": 6,
            "difference": None,
        }
    ]
    assert found["engine_counters"]["num_finished"] == 6, "the warm-up is not counted"
    assert found["engine_counters"]["num_steps"] > 8


@pytest.mark.parametrize(
    ("compared", "place", "whom"),
    [((), 4, "to the plain run"), (("--compare", "max_rows=2"), 24, "across 2 variants")],
)
def test_unequal_tokens_are_status_1_and_shown(
    llm: type[FakeLLM], bench_of: Callable[..., Any], compared: tuple[str, ...], place: int, whom: str
) -> None:
    llm.wrong = lambda options, length: length == 24 and options == ({"max_rows": 2} if compared else {})
    ended = bench_of(SMALL, *(compared or ["--check"]))
    assert ended.status == 1
    assert f"tokens equal {whom}: 0 of 6\n  first difference: request 0: " in ended.out
    other = "another variant" if compared else "the plain run"
    assert f" at position {place}, {other} has " in ended.out


def test_variants_are_measured_in_turn_and_stand_side_by_side(
    llm: type[FakeLLM], bench_of: Callable[..., Any], tmp_path: Path
) -> None:
    off = "drafts=none,prefix-cache=false"
    asked = "--workload multi-turn --num-requests 9 --turns 3 --input-len 6 --output-len 4 --system-len 10"
    asked += f" --drafts ngram --prefix-cache true --compare {off} --compare max_rows=1"
    ended = bench_of(asked, "--check", "--json", tmp_path / "out.json")
    assert ended.status == 0, ended
    on = {"drafts": "ngram", "prefix_cache": True}
    plain = {"drafts": "none", "prefix_cache": False, "max_rows": 1}
    assert llm.opened == [on, {"drafts": "none", "prefix_cache": False}, on | {"max_rows": 1}, plain]
    assert value(ended.out, "Successful requests:") == ["9", "9", "9"]
    assert ended.out.splitlines()[1].split() == ["drafts=ngram", "drafts=none", "max_rows=1"]
    assert ended.out.splitlines()[2].split() == ["prefix_cache=true", "prefix_cache=false"]
    statements = ended.out.splitlines()[-4:]
    assert statements == [
        "tokens equal across 3 variants: 9 of 9",
        "tokens equal to the plain run (drafts=ngram,prefix_cache=true): 9 of 9",
        "tokens equal to the plain run (drafts=none,prefix_cache=false): 9 of 9",
        "tokens equal to the plain run (max_rows=1): 9 of 9",
    ]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["variant"] == "drafts=ngram,prefix_cache=true" and found["engine_options"] == on
    assert [other["variant"] for other in found["compared"]] == [
        "drafts=none,prefix_cache=false",
        "max_rows=1",
    ]
    assert all(not set(SPREADS) - set(other) for other in found["compared"])


def test_failed_requests_are_in_the_table_and_status_1(
    llm: type[FakeLLM], bench_of: Callable[..., Any], tmp_path: Path
) -> None:
    lines = [
        {"prompt": "good"},
        {"prompt": [VOCAB]},
        {"prompt": [5] * 200},
        {"prompt": [1, 2], "max_tokens": 2},
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    ended = bench_of("--workload", file, "--output-len", 3, "--check")
    assert ended.status == 1
    assert value(ended.out, "Successful requests:") == ["2"] and value(ended.out, "Failed requests:") == ["2"]
    assert "tokens equal to the plain run: 2 of 2 (2 did not complete)" in ended.out
    assert value(ended.out, "Total generated tokens:") == ["5"]
    failures = [line for line in ended.err.splitlines() if line.startswith("failed")]
    assert (
        f"{file}:2: token id {VOCAB} at position 0" in failures[0]
        and f"{file}:3: prompt is 200 tokens" in failures[1]
    )


def test_an_engine_that_breaks_fails_its_requests(llm: type[FakeLLM], bench_of: Callable[..., Any]) -> None:
    def breaks(session: FakeSession) -> None:
        if len(session.shapes) == 12:
            raise RuntimeError("out of memory")

    llm.before_run = breaks
    ended = bench_of(SMALL, "--concurrency", 1, "--num-warmups", 0)
    assert ended.status == 1 and value(ended.out, "Successful requests:") == ["1"]
    assert value(ended.out, "Failed requests:") == ["5"] and "out of memory" in ended.err


@pytest.mark.parametrize("asked", [129, 10**22])
def test_an_answer_of_more_tokens_than_the_engine_gives_is_not_cut_in_silence(
    llm: type[FakeLLM], bench_of: Callable[..., Any], tmp_path: Path, asked: int
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"prompt": "a", "max_tokens": 128}}\n{{"prompt": "a", "max_tokens": {asked}}}\n')
    ended = bench_of("--workload", file)
    assert ended.status == 2 and not llm.opened
    reason = f"max_tokens is {asked}, the engine runs with max_len=128; lower it"
    assert ended.err == f"error: {file}:2: {reason}\n"
    assert bench_of("--workload", file, "--num-requests", 1).status == 0


def test_ctrl_c_prints_what_finished(
    llm: type[FakeLLM], bench_of: Callable[..., Any], tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGINT)

    def press(session: FakeSession) -> None:
        if len(session.shapes) == 12:  # in the second request; the handler is gone once the run has stopped
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            deadline = time.monotonic() + 60
            while signal.getsignal(signal.SIGINT) is not before and time.monotonic() < deadline:
                time.sleep(0.001)

    llm.before_run = press
    arguments = (SMALL, "--concurrency", 1, "--num-warmups", 0, "--check", "--compare", "max_rows=2")
    ended = bench_of(*arguments, "--json", tmp_path / "out.json")
    assert ended.status == 130 and len(llm.opened) == 1
    assert value(ended.out, "Successful requests:") == ["1"] and value(ended.out, "Unfinished requests:") == [
        "5"
    ]
    assert (
        "tokens equal" not in ended.out and json.loads((tmp_path / "out.json").read_text())["unfinished"] == 5
    )
    assert signal.getsignal(signal.SIGINT) is before


def test_a_rate_keeps_its_schedule(llm: type[FakeLLM], bench_of: Callable[..., Any], tmp_path: Path) -> None:
    arguments = (SMALL, "--request-rate", 100, "--burstiness", "inf", "--json", tmp_path / "out.json")
    ended = bench_of(*arguments)
    assert ended.status == 0 and value(ended.out, "Request rate configured (RPS):") == ["100.00"]
    found = json.loads((tmp_path / "out.json").read_text())
    assert (
        found["start_times"] == pytest.approx([0.01 * i for i in range(1, 7)])
        and found["burstiness"] == "inf"
    )
    assert all(queued >= 0 for queued in found["queue_times"])


def test_a_picture(llm: type[FakeLLM], bench_of: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert bench_of(SMALL, "--plot", tmp_path / "a.png", "--compare", "max_rows=1").status == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_without_permission_costs_what_was_measured(
    llm: type[FakeLLM], bench_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    is_there: bool,
) -> None:  # fmt: skip
    """root may write to all: what the system would say to others."""
    file = tmp_path / "out.json"
    if is_there:
        file.touch()
    denied = file if is_there else tmp_path
    monkeypatch.setattr(os, "access", lambda path, mode, **_: (path, mode) != (denied, os.W_OK))
    ended = bench_of(SMALL, "--json", file)
    assert (ended.status, llm.opened) == (2, [])
    assert f"--json {file} cannot be written" in ended.err


def test_dollars_in_the_name_of_a_file_are_a_formula_that_costs_the_picture(
    llm: type[FakeLLM], bench_of: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    (file := tmp_path / "$_$.jsonl").write_text('{"prompt": "abc"}')
    asked = "--output-len 4 --num-requests 1"
    assert bench_of("--workload", file, asked, "--plot", tmp_path / "a.svg").status == 0
    assert "$_$.jsonl" in (tmp_path / "a.svg").read_text()


def test_without_matplotlib_a_picture_is_refused_before_the_run(
    llm: type[FakeLLM], bench_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(written.util, "find_spec", lambda name: None)
    ended = bench_of(SMALL, "--plot", tmp_path / "a.png")
    assert ended.status == 2 and not llm.opened
    assert ended.err == (
        f"error: --plot needs matplotlib, which is missing; {install('bench')} or leave --plot out\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--json", "/absent/out.json"], "--json /absent/out.json cannot be written"),
        (["--plot", "/"], "--plot / cannot be written"),
        (
            ["--compare", "max_row=2"],
            "--compare max_row=2: unknown option 'max_row'; the options are max_len",
        ),
        (["--compare", "max_rows"], "--compare 'max_rows' holds 'max_rows'; write NAME=VALUE"),
        (["--max-rows", "many"], "--max-rows is 'many'"),
        (["--num-request", "3"], "No such option: --num-request"),
        (["extra"], "--engine-dir engine and 'extra' were both given; drop one"),
        (["--max-rows"], "'--max-rows' requires an argument"),
        (["--request-rate", "nan"], "--request-rate is nan"),
        (["--concurrency", "0"], "--concurrency is 0"),
        (
            ["--plot", "/picture.foo"],
            "--plot /picture.foo ends in .foo, which is no kind of picture;",
        ),
        (["--plot", "/picture"], "--plot /picture ends in no suffix"),
        (
            ["--input-len", "100", "--output-len", "29"],
            "129 tokens, the engine runs with max_len=128; lower --input-len",
        ),
        (
            ["--max-len", "64", "--input-len", "60", "--output-len", "8"],
            "68 tokens, the engine runs with max_len=64",
        ),
        (["--workload", ""], "--workload is empty; give random, multi-turn or a file"),
        (["--json", ""], "--json is empty; give a file"),
        (["--text", ""], "--text is empty; give a file"),
        (["--compare", "drafts=foo"], "--compare drafts=foo: drafts is 'foo'; give 'none'"),
        (
            ["--memory-fraction", "nan", "--compare", "max_rows=2"],
            "--memory-fraction is nan; give a",
        ),
        (["--workload", "rando"], "cannot read rando: No such file or directory"),
        (["--workload", "multi-turn", "--text", "/absent.txt"], "--text /absent.txt cannot be read"),
        (["--workload", __file__, "--text", __file__], "were both given; drop one"),
        (
            ["--compare", "max_len=64", "--input-len", "62", "--output-len", "9"],
            "--compare max_len=64: the longest session is 71",
        ),
        (
            ["--workload", "multi-turn", "--input-len", "99999999999"],
            "tokens, the engine runs with max_len=128",
        ),
    ],
)
def test_mistakes_are_refused_before_an_engine_is_opened(
    llm: type[FakeLLM], bench_of: Callable[..., Any], arguments: list[str], words: str
) -> None:
    ended = bench_of(*arguments)
    assert ended.status == 2 and not llm.opened and not ended.out
    assert ended.err.startswith("error: ") and words in ended.err and ended.err.count("\n") == 1


def test_a_variant_that_is_refused_does_not_cost_what_was_measured_before_it(
    llm: type[FakeLLM], bench_of: Callable[..., Any], tmp_path: Path
) -> None:
    arguments = (SMALL, "--compare", "max_rows=1", "--compare", "cache_bytes=1", "--compare", "max_rows=2")
    ended = bench_of(*arguments, "--json", tmp_path / "out.json")
    assert ended.status == 2 and value(ended.out, "Successful requests:") == ["6", "6"]
    assert "tokens equal across 2 variants: 6 of 6" in ended.out and (tmp_path / "out.json").is_file()
    assert ended.err.splitlines()[-1] == "error: --compare cache_bytes=1: the cache may take 1 bytes"


def test_a_variant_that_the_engine_was_not_built_for_is_refused_before_any_is_measured(
    engine_dir: Path, bench_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "LLM", None)
    ended = bench_of(SMALL, "--compare", "num_drafts=1", "--compare", "max_rows=9", engine_dir=engine_dir)
    assert ended.status == 2 and not ended.out
    assert ended.err.startswith("error: --compare max_rows=9: max_rows is 9, the engine was built for 8")


def test_text_is_where_prompts_come_from(
    llm: type[FakeLLM], bench_of: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("abc" * 50)
    submitted = _submitted(llm)
    ended = bench_of(SMALL, "--text", tmp_path / "a.txt", "--num-warmups", 0)
    assert ended.status == 0 and "warning" not in ended.err
    prompts = [prompt for prompt, _ in submitted]
    assert len(prompts) == 6 and set(chain(*prompts)) == {ord(c) % VOCAB for c in "abc"}
    (tmp_path / "a.txt").write_text("")
    assert "is empty" in bench_of(SMALL, "--text", tmp_path / "a.txt").err


def test_multi_turn_has_text_without_being_given_one(
    llm: type[FakeLLM], bench_of: Callable[..., Any]
) -> None:
    submitted = _submitted(llm)
    asked = "--workload multi-turn --num-requests 2 --turns 2 --input-len 30 --output-len 4 --system-len 20"
    assert bench_of(asked, "--num-warmups 0").status == 0
    first, second = [prompt for prompt, _ in submitted]
    assert len(first) == 50 and len(second) == 50 + 4 + 30 and second[:50] == first
    assert len(set(first)) < 45, "text repeats itself"


@pytest.mark.parametrize(
    ("arguments", "ignored"),
    [
        (["--workload", "random"], True),
        (["--workload", "FILE"], False),
        (["--workload", "FILE", "--ignore-eos"], True),
        (["--workload", "random", "--no-ignore-eos"], False),
    ],
)
def test_files_end_at_the_end_token(
    llm: type[FakeLLM], bench_of: Callable[..., Any], tmp_path: Path, arguments: list[str], ignored: bool
) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "abc"}')
    submitted = _submitted(llm)
    file = str(tmp_path / "data.jsonl")
    arguments = [argument.replace("FILE", file) for argument in arguments]
    assert bench_of(*arguments, "--input-len", 4, "--output-len", 4, "--num-requests", 1).status == 0
    assert [params.ignore_eos for _, params in submitted] == [ignored]


def _submitted(llm: type[FakeLLM]) -> list[tuple[list[int], SamplingParams]]:
    """Prompts and parameters, warm-ups left out."""
    submitted: list[tuple[list[int], SamplingParams]] = []

    def submit(self: FakeLLM, prompt: list[int], params: SamplingParams, on_piece: OnPiece) -> int:
        submitted.append((prompt, params))
        return FakeLLM.submit(self, prompt, params, on_piece)

    llm.submit = submit
    return submitted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("drafts=none,prefix_cache=false", {"drafts": "none", "prefix_cache": False}),
        ("max-rows = 4, memory_fraction=0.25", {"max_rows": 4, "memory_fraction": 0.25}),
        ("max_len=auto", {"max_len": "auto"}),
    ],
)
def test_variants_are_named_values(text: str, expected: dict[str, object]) -> None:
    assert parse_variant(text) == expected


@pytest.mark.parametrize("text", ["", "a", "a=", "=1", "a=1,,b=2", "a=1,a=2"])
def test_variants_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(Refused, match="--compare"):
        parse_variant(text)


def test_a_tiny_engine_from_end_to_end(
    engine_dir: Path, bench_of: Callable[..., Any], tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "def "}, {"role": "assistant", "content": "f(x): return x"}]
    lines = [{"prompt": "import os"}, {"messages": chat}, {"prompt": [4] * 70}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = ("--workload", tmp_path / "data.jsonl", "--output-len", 10, "--ignore-eos", "--check")
    out = bench_of(*asked, "--compare", "max_rows=2,max_step_tokens=16", engine_dir=engine_dir).out
    assert value(out, "Successful requests:") == ["3", "3"]
    assert out.endswith(
        "tokens equal across 2 variants: 3 of 3\n"
        "tokens equal to the plain run (defaults): 3 of 3\n"
        "tokens equal to the plain run (max_rows=2,max_step_tokens=16): 3 of 3\n"
    )


def test_an_engine_of_a_config_is_made_measured_and_removed(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, bench_of: Callable[..., Any]
) -> None:
    shutil.copy(tiny_checkpoint("qwen3_5") / "config.json", tmp_path)
    made = ("--random-weights", tmp_path, "--max-len", 64, "--max-rows", 2, "--max-step-tokens", 32)
    ended = bench_of(*made, SMALL, "--drafts", "none", "--check", engine_dir=None)
    assert ended.status == 0 and value(ended.out, "Successful requests:") == ["6"], ended
    assert "tokens equal to the plain run: 6 of 6" in ended.out
    for arguments, words in (
        (made, "give one of --engine-dir DIR"),
        (("--random-weights", tmp_path), "one of"),
    ):
        ended = bench_of(*arguments)
        assert ended.status == 2 and words in ended.err


def test_a_build_that_fails_says_why_once_and_is_not_silent_before(tmp_path: Path) -> None:
    """What build-engine says of its stages was read, and thrown away."""
    command = [sys.executable, "-m", "hemiola", "bench", "--random-weights", str(tmp_path / "none")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (2, "")
    said = without_stages(ended.stderr)
    assert said.startswith(f"error: {tmp_path / 'none'} is not a directory") and said.count("\n") == 1
