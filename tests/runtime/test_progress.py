"""What people see of a long build or start: on a terminal, in a log, in a notebook, from Python."""

import io
import json
import subprocess
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from hemiola.plugins.cpu import jit
from hemiola.runtime import progress
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM
from hemiola.runtime.progress import READY, WRITING, Bar, File, Lines, read_report, show
from hemiola.runtime.serving.launcher import Server

ROOT = Path(__file__).resolve().parents[2]


class Log:
    """Lines by a clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lines: list[str] = []
        self.display = Lines(self.lines.append, lambda: self.now)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_log_has_one_line_for_a_stage_with_its_time(log: Log) -> None:
    with log.display as report:
        report("exporting trunk", 0, 0)
        log.now += 6.5
        report(WRITING, 0, 3 * 2**30)
        log.now += 4
        report(WRITING, 3 * 2**30, 3 * 2**30)
        log.now += 4
        report("hashing", 0, 0)
        log.now += 5
    assert log.lines == [
        "exporting trunk: 6.5 s",
        "writing weights 3.0 GiB of 3.0 GiB: 8.0 s",
        "hashing: 5.0 s",
    ]


def test_short_stages_do_not_fill_a_log(log: Log) -> None:
    with log.display as report:
        for n in range(100):
            report(f"stage {n}", 0, 0)
            log.now += 4.9
    assert log.lines == []


def test_no_stage_of_minutes_is_silent(log: Log) -> None:
    """A minute passed between two lines where one kernel took long."""
    with log.display as report:
        report("compiling kernels", 0, 34)
        said: list[int] = [0]
        for second in range(300):
            report("compiling kernels", min(second, 28), 34)
            if len(log.lines) >= len(said):
                said.append(second)
            log.now += 1
        assert max(b - a for a, b in pairwise(said)) <= 30 and len(log.lines) < 15, log.lines
        assert log.lines[0] == "compiling kernels 5 of 34: 5.0 s so far"
        report(READY, 0, 0)
    assert log.lines[-1] == "compiling kernels 34 of 34: 300.0 s", "a stage that has ended is complete"


def test_a_stage_that_failed_is_not_said_to_have_ended(log: Log) -> None:
    with pytest.raises(Refused), log.display as report:
        report("opening weights", 3, 9)
        log.now += 30
        raise Refused("other", message="no memory")
    assert log.lines == []


def test_engines_that_start_together_are_kept_apart(log: Log) -> None:
    with log.display as report:
        report("starting tritonserver", 0, 0)
        report("compiling kernels", 1, 9, subject="a")
        log.now += 10
        report("compiling kernels", 2, 9, subject="b")
        report(READY, 0, 0, subject="a")
        log.now += 7
        report("starting tritonserver", 0, 0)
        report(READY, 0, 0, subject="a")  # a server reads it again and again
        report("compiling kernels", 3, 9, subject="b")
    assert log.lines == [
        "a: compiling kernels 9 of 9: 10.0 s",
        "starting tritonserver: 17.0 s so far",
        "b: compiling kernels 3 of 9: 7.0 s so far",
        "starting tritonserver: 17.0 s",
        "b: compiling kernels 9 of 9: 7.0 s",
    ]


def test_a_log_that_nobody_reads_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    progress.say_on_stderr("a line")


def test_a_terminal_shows_the_stage_with_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with show(None, file=terminal) as report:
        assert isinstance(report, Bar)
        report("compiling kernels", 3, 34)
        report("compiling kernels", 4, 34, subject="qwen")
        report(READY, 0, 0)
        report._progress.refresh()
    shown = terminal.getvalue()
    assert "compiling kernels" in shown and "3 of 34" in shown
    assert "qwen: compiling kernels" in shown and "4 of 34" in shown


@pytest.mark.parametrize(
    ("wanted", "terminal", "notebook", "kind"),
    [
        (None, False, False, "silent"),
        (None, False, True, "Lines"),
        (None, True, False, "Bar"),
        (True, False, False, "Lines"),
        (True, True, False, "Bar"),
        (False, True, True, "silent"),
    ],
)
def test_who_sees_what(
    monkeypatch: pytest.MonkeyPatch, wanted: bool | None, terminal: bool, notebook: bool, kind: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI has it: no log is a terminal for that
    if notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    with show(wanted, file=Terminal() if terminal else io.StringIO()) as display:
        assert getattr(display, "__name__", type(display).__name__) == kind


def test_a_terminal_that_cannot_write_over_a_line_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with show(True, file=Terminal()) as display:
        assert isinstance(display, Lines)


def test_opening_an_engine_tells_its_stages_in_order(engine_dir: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    with LLM(engine_dir, progress=lambda *report: seen.append(report)) as llm:
        num_weights = len({name for segment in llm.manifest.segments for name in segment.weights})
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert [stage for stage in stages if stage != "compiling kernels"] == [
        "reading the tokenizer", "importing", "taking memory for the cache", "opening weights",
        "reading programs", READY,
    ]  # fmt: skip
    counts = [(done, total) for stage, done, total in seen if stage == "opening weights"]
    assert counts == [(done, num_weights) for done in range(num_weights)]


def test_opening_in_a_pipe_is_silent(engine_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with LLM(engine_dir):
        pass
    assert capfd.readouterr() == ("", "")


def test_who_raises_in_a_report_has_opened_no_engine(engine_dir: Path) -> None:
    def enough(stage: str, done: int, total: int) -> None:
        if stage == "opening weights":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LLM(engine_dir, progress=enough)


COLD = """
import sys
from hemiola import LLM
from hemiola.plugins.cpu import jit
known = []
prepare = jit.prepare
def count(report):
    known.append(len(jit.KERNELS))
    jit.KERNELS[:], kept = jit.KERNELS[:2], jit.KERNELS[2:]
    prepare(report)
    jit.KERNELS += kept
    raise SystemExit
jit.prepare = count
LLM(sys.argv[1], progress=lambda *report: print(*report, sep="|"))
"""


def test_a_cold_cache_of_kernels_shows_a_count(engine_dir: Path, tmp_path: Path) -> None:
    """Of two of them, which is enough; and a warm one shows none."""
    said = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", COLD, str(engine_dir)], capture_output=True, text=True, timeout=600,
            env={"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        said.append([line for line in ran.stdout.splitlines() if line.startswith("compiling")])
    counts = [(0, 2), (1, 2), (1, 2), (2, 2)]
    assert said == [[f"compiling kernels|{done}|{total}" for done, total in counts], []]


def test_no_kernel_is_compiled_outside_of_the_count(tiny_engine: Callable[..., Path]) -> None:
    """A kernel that became known after the count would be compiled without a word."""
    folder = tiny_engine("nemotron_h_moe")
    code = """
import sys
from hemiola import LLM
from hemiola.plugins.cpu import jit
known, prepare = [], jit.prepare
def count(report):
    known.append(len(jit.KERNELS))
    prepare(report)
jit.prepare = count
LLM(sys.argv[1]).close()
assert known == [len(jit.KERNELS)], (known, len(jit.KERNELS))
"""
    subprocess.run([sys.executable, "-c", code, folder], check=True, timeout=600)


def test_another_process_reads_the_last_report(tmp_path: Path) -> None:
    path = tmp_path / "hemiola"
    assert read_report(path) is None
    report = File(path)
    report("compiling kernels", 3, 34)
    report("opening weights", 1, 9)
    assert read_report(path) == ("opening weights", 1, 9)
    path.write_text(json.dumps(["opening"]))
    assert read_report(path) is None
    File(tmp_path / "gone" / "hemiola")("opening weights", 1, 9)  # its server has ended


def test_serve_shows_what_its_engines_processes_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int, str]] = []
    server = Server({"a": tmp_path, "b": tmp_path})
    server._process = types.SimpleNamespace(poll=lambda: None, wait=lambda *_: 0, pid=0)  # pyright: ignore
    environments = types.SimpleNamespace(note=lambda: None)
    server._home = types.SimpleNamespace(  # pyright: ignore
        doors=tmp_path, stages=tmp_path, beats=tmp_path, environments=environments
    )
    server._guard = types.SimpleNamespace(start=lambda doors: None)  # pyright: ignore
    server._log = types.SimpleNamespace(ready=False)  # pyright: ignore
    script = iter([lambda: None, lambda: File(tmp_path / "b")("compiling kernels", 3, 34), None])

    def answers(path: Path, word: str) -> bool:
        if word == "/metrics":
            return True
        step = next(script)
        if step is None:
            return True
        step()
        return False

    monkeypatch.setattr("hemiola.runtime.serving.launcher.answers", answers)
    server._await_ready(lambda stage, done, total, subject="": seen.append((stage, done, total, subject)))
    server._process = server._home = server._guard = None
    starting = ("starting tritonserver", 0, 0, "")
    assert seen == [starting, starting, ("compiling kernels", 3, 34, "b")]


def test_kernels_of_another_source_are_not_taken_for_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = next(kernel for kernel in jit.KERNELS if kernel.name == "_run")
    kernel.compile()
    assert kernel.is_kept()
    monkeypatch.setattr(kernel, "_compiled", None)  # as in another process
    assert kernel.is_kept()
    monkeypatch.setattr("hemiola.plugins.cpu.cache.sources", lambda file: "0" * 64)
    assert not kernel.is_kept()
