"""A conversation through a pipe and at a terminal."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hemiola.runtime.api import Metrics, Piece, SamplingParams
from hemiola.runtime.cli.chat import summary
from hemiola.runtime.cli.terminal import say as say_
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
# An answer that only Ctrl-C ends.
ENDLESS = """
import threading, hemiola.runtime.llm
from hemiola.runtime.api import Piece
class Endless:
    def __init__(self, engine_dir, **options): ...
    def __enter__(self): return self
    def __exit__(self, *_): ...
    def chat_text(self, messages): return f"{len(messages)} messages"
    def stream(self, prompt, params):
        yield Piece(f"<{prompt}>", [1])
        while not threading.Event().wait(1): ...  # a signal just before a wait is seen when that ends
hemiola.runtime.llm.LLM = Endless
import sys
from hemiola.runtime.__main__ import main
sys.argv = ["hemiola", "chat", "engine"]
main()
"""


class Fake:
    """Answers with how many messages it got; keeps what it was asked."""

    asked: list[list[dict[str, str]]]

    def __init__(self, engine_dir: Path, **options: object) -> None: ...

    def __enter__(self) -> "Fake":
        return self

    def __exit__(self, *_: object) -> None: ...

    def chat_text(self, messages: list[dict[str, str]]) -> str:
        if messages[-1]["content"] == "too long":
            raise Refused("other", message="prompt is too long; shorten it")
        self.asked.append([dict(message) for message in messages])
        return messages[-1]["content"]

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[Piece]:
        yield Piece("one ", [1])
        if prompt == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if prompt == "fail":
            yield Piece("", [], finish_reason="error", metrics=METRICS, error="the engine failed: KeyError")
        yield Piece("two", [2], finish_reason="length", metrics=METRICS)


METRICS = Metrics(7, 0.0, first_token=1.0, last_token=1.5, num_output_tokens=2, cached_tokens=4)
TOOK = "[2 tokens, 2.0 tokens/s, 4 of 7 prompt tokens cached]"


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, hemiola: Callable) -> Callable[..., Any]:
    Fake.asked = []
    monkeypatch.setattr("hemiola.runtime.llm.LLM", Fake)

    def run(*lines: str, options: tuple[str, ...] = ()) -> Any:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return hemiola("chat", "engine", *options)

    return run


def contents() -> list[list[str]]:
    return [[message["content"] for message in messages] for messages in Fake.asked]


def test_a_conversation_has_what_was_said_before(say: Callable) -> None:
    ended = say("a", "", "  b ")
    assert (ended.status, ended.out) == (0, "one two\none two\n")
    assert ended.err.splitlines() == [TOOK, TOOK]
    assert contents() == [["a"], ["a", "one two", "b"]]
    assert [message["role"] for message in Fake.asked[-1]] == ["user", "assistant", "user"]


def test_reset_keeps_the_system_message_alone(say: Callable) -> None:
    say("a", "/reset", "b", options=("--system", "be brief"))
    assert contents() == [["be brief", "a"], ["be brief", "b"]]
    assert Fake.asked[0][0]["role"] == "system"


def test_exit_ends_before_what_follows(say: Callable) -> None:
    assert say("/exit", "a").status == 0 and contents() == []


def test_a_word_with_a_slash_that_is_no_command_is_refused_and_a_sentence_is_not(say: Callable) -> None:
    ended = say("/reste", "/etc is a folder")
    assert "/reste is no command; /reset begins again" in ended.err and contents() == [["/etc is a folder"]]


def test_a_message_that_is_refused_is_not_kept(say: Callable) -> None:
    ended = say("too long", "a")
    assert "[error: prompt is too long; shorten it]" in ended.err and contents() == [["a"]]


def test_text_that_is_not_utf8_is_refused_by_name(say: Callable) -> None:
    ended = say("a\udcff", "b")
    assert "[error: message is not UTF-8" in ended.err and contents() == [["b"]]


def test_ctrl_c_ends_an_answer_and_what_was_said_is_kept(say: Callable) -> None:
    ended = say("interrupt", "a")
    assert (ended.status, ended.out) == (0, "one \none two\n")
    assert contents()[-1] == ["interrupt", "one ", "a"]
    assert "[Ctrl-C again ends the program]" in ended.err


def test_a_message_between_makes_two_interrupts_of_answers_no_end(say: Callable) -> None:
    assert say("interrupt", "interrupt", "a").status == 0 and len(contents()) == 3


def test_an_engine_that_failed_ends_the_conversation(say: Callable) -> None:
    ended = say("fail", "a")
    assert (ended.status, ended.err) == (1, "error: the engine failed: KeyError\n") and len(contents()) == 1


def test_a_model_says_what_a_terminal_obeys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a new title, or what the clipboard is to hold. Into a pipe all goes as it is."""
    text = "a\x1b]52;c;cm0gLXJm\x07b\x9b2J\tc\r\nd é 😀"
    say_(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    say_(text)
    assert capsys.readouterr().out == "a\ufffd]52;c;cm0gLXJm\ufffdb\ufffd2J\tc\nd é 😀"


def test_the_line_under_an_answer_counts_drafts() -> None:
    metrics = Metrics(3, 0.0, num_output_tokens=1, drafted=[5, 4], accepted=[3, 1])
    assert summary(metrics) == "1 tokens, 4 of 9 drafts accepted, 0 of 3 prompt tokens cached"


def test_answers_through_a_pipe_are_the_engines(engine_dir: Path) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    messages, wanted = [], []
    with LLM(engine_dir, max_rows=1) as llm:
        for line in ("def", "again"):
            messages.append({"role": "user", "content": line})
            wanted.append(llm.chat(messages, params).text)
            messages.append({"role": "assistant", "content": wanted[-1]})
    command = [sys.executable, "-m", "hemiola", "chat", engine_dir, "--max-tokens", "6", "--ignore-eos"]
    done = subprocess.run(
        command, input="def\nagain\n", env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "".join(f"{text}\n" for text in wanted)), done.stderr
    assert len(re.findall(r"^\[6 tokens, .* tokens/s", done.stderr, re.MULTILINE)) == 2


def test_at_a_terminal_ctrl_c_ends_an_answer_and_a_second_one_the_program() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS],
        stdin=theirs, stdout=theirs, stderr=theirs, env=ENVIRONMENT | {"TERM": "dumb"},
        preexec_fn=lambda: os.login_tty(theirs), pass_fds=(theirs,),
    )  # fmt: skip
    os.close(theirs)
    try:
        shown = until(ours, "> ")
        assert "/reset begins again" in shown
        os.write(ours, b"a\n")
        until(ours, "<1 messages>")
        os.write(ours, b"\x03")
        until(ours, "Ctrl-C again ends the program", "> ")
        os.write(ours, b"b\n")
        until(ours, "<3 messages>")
        os.write(ours, b"\x03")
        until(ours, "> ")
        # between readline's prompt and its wait for a key, an interrupt is seen with the next one
        for _ in range(30):
            os.write(ours, b"\x03")
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
                break
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def until(terminal: int, *words: str) -> str:
    """What the terminal shows up to these words, one after the other."""
    shown, at = "", 0
    for word in words:
        while word not in shown[at:]:
            shown += os.read(terminal, 1024).decode()
        at = shown.index(word, at) + len(word)
    return shown
