"""`hemiola chat`"""

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hemiola.runtime.api import Metrics, Piece, SamplingParams
from hemiola.runtime.cli.generate import LONE_REQUEST, NOT_OF_ONE_ANSWER, opened
from hemiola.runtime.cli.options import given, only_engine, options_of, takes, utf8
from hemiola.runtime.cli.terminal import say
from hemiola.runtime.errors import Failed, Refused
from hemiola.runtime.options import ServeConfig

if TYPE_CHECKING:  # torch takes seconds; --help should not
    from hemiola.runtime.llm import LLM

DEFAULTS: dict[str, Any] = {"max_tokens": 1024}
HELP = "/reset begins again, /exit (or Ctrl-D) ends; Ctrl-C ends an answer, a second one the program"
AGAIN = "Ctrl-C again ends the program"


@takes(options_of(SamplingParams, NOT_OF_ONE_ANSWER, DEFAULTS), options_of(ServeConfig, LONE_REQUEST))
def chat(
    engine: Annotated[str | None, typer.Argument(metavar="ENGINE", hidden=True)] = None,
    engine_dir: Annotated[
        Path | None, typer.Option(help="made by build-engine; the same as the argument ENGINE")
    ] = None,
    system: Annotated[str | None, typer.Option(help="system message of the conversation")] = None,
    **options: Any,
) -> None:
    """Talk to a model: a message a line, answers as they come. /help lists the commands."""
    params = SamplingParams(**DEFAULTS | given(SamplingParams, options))
    folder = only_engine(engine_dir, engine)
    with opened(folder, given(ServeConfig, options)) as llm, interruptible():
        Conversation(llm, params, system).run()


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where a script's background job began without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """Messages of a user at a terminal, or from a pipe, and the model's answers."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None) -> None:
        self._llm, self._params = llm, params
        self._first: list[dict[str, object]] = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, object]] = list(self._first)
        self._interrupted = False  # since the last message
        self._at_terminal = sys.stdin.isatty()

    def run(self) -> None:
        """Until the user leaves."""
        if self._at_terminal:
            import readline  # noqa: F401  input() then edits lines and keeps them

            _note(HELP)
        while True:
            try:
                line = utf8("message", input("> " if self._at_terminal else ""))
                self._interrupted = False
                if line.strip() == "/exit":
                    return
                self._take(line.strip())
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                if self._interrupted:
                    raise
                self._interrupted = True
                _note(AGAIN)
            except Refused as error:
                _note(f"error: {error}")

    def _take(self, line: str) -> None:
        match line:
            case "":
                pass
            case "/help":
                _note(HELP)
            case "/reset":
                self._messages = list(self._first)
                _note("the conversation begins again")
            case _ if re.match(r"/[a-z]+$", line):
                raise Refused("unknown", message=f"{line} is no command", way_out=f"{HELP}")
            case _:
                self._answer(line)

    def _answer(self, line: str) -> None:
        """An answer that is interrupted is kept as far as it came; a message without an answer is not."""
        messages = [*self._messages, {"role": "user", "content": line}]
        pieces = self._llm.stream(self._llm.chat_text(messages), self._params)
        said: list[str] = []
        try:
            self._show(pieces, said)
        finally:
            if said:
                self._messages = [*messages, {"role": "assistant", "content": "".join(said)}]

    def _show(self, pieces: Iterator[Piece], said: list[str]) -> None:
        for piece in pieces:
            said.append(piece.text)
            say(piece.text)
            if piece.finish_reason == "error":
                raise piece.refused or Failed(piece.error or "the engine failed")
            if piece.finish_reason is not None and piece.metrics is not None:
                print(flush=True)
                _note(summary(piece.metrics))


def summary(metrics: Metrics) -> str:
    """What an answer took, in a line."""
    parts = [f"{metrics.num_output_tokens} tokens"]
    if metrics.time_per_output_token:
        parts.append(f"{1 / metrics.time_per_output_token:.1f} tokens/s")
    if sum(metrics.drafted):
        parts.append(f"{sum(metrics.accepted)} of {sum(metrics.drafted)} drafts accepted")
    parts.append(f"{metrics.cached_tokens} of {metrics.num_prompt_tokens} prompt tokens cached")
    return ", ".join(parts)


def _note(text: str) -> None:
    """Beside the conversation: on stderr, so that a pipe gets answers alone."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}[{text}]{plain}", file=sys.stderr, flush=True)
