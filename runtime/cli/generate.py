"""`hemiola generate`"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.cli.options import engine_and_rest, given, not_utf8, options_of, takes, utf8
from hemiola.runtime.cli.terminal import say
from hemiola.runtime.errors import Failed, Refused, shown
from hemiola.runtime.options import ServeConfig
from hemiola.runtime.progress import show

if TYPE_CHECKING:  # torch takes seconds; --help should not
    from hemiola.runtime.llm import LLM

LONE_REQUEST = {"max_rows": 1}
DEFAULTS: dict[str, Any] = {"max_tokens": 128}
NOT_OF_ONE_ANSWER = ("bad_words_ids", "logprobs", "prompt_logprobs", "num_drafts", "priority", "cache_salt")


@takes(options_of(SamplingParams, NOT_OF_ONE_ANSWER, DEFAULTS), options_of(ServeConfig, LONE_REQUEST))
def generate(
    engine: Annotated[str | None, typer.Argument(metavar="ENGINE", hidden=True)] = None,
    text: Annotated[str | None, typer.Argument(metavar="PROMPT", hidden=True)] = None,
    engine_dir: Annotated[
        Path | None, typer.Option(help="made by build-engine; the same as the argument ENGINE")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="prompt as text; the same as the argument PROMPT")
    ] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="IDS", help="prompt as token ids; the output is token ids, too")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="read the prompt from a file; - is stdin")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="the prompt is a user's message")] = False,
    **options: Any,
) -> None:
    """Stream one answer to stdout; counts and speed go to stderr."""
    params = SamplingParams(**DEFAULTS | given(SamplingParams, options))
    folder, texts = engine_and_rest(engine_dir, engine, text)
    asked = _read_prompt([*texts, *([] if prompt is None else [prompt])], prompt_ids, prompt_file)
    if chat and prompt_ids is not None:
        message = "--chat needs a prompt as text"
        raise Refused("conflict", "chat", message=message, way_out="drop it, or give --prompt TEXT")
    with opened(folder, given(ServeConfig, options)) as llm:
        if chat:
            asked = llm.chat_text([{"role": "user", "content": asked}])
        last = _show(llm.stream(asked, params), as_ids=prompt_ids is not None)
    _report(last)


@contextmanager
def opened(engine_dir: Path, options: dict[str, Any]) -> Iterator["LLM"]:
    """An LLM for one request at a time. It is shown what is waited for, the import of torch first."""
    with show(True) as display:
        display("starting", 0, 0)
        from hemiola.runtime.llm import LLM

        llm = LLM(engine_dir, progress=display, **LONE_REQUEST, **options)
    with llm:
        yield llm


def _show(pieces: Iterable[Piece], as_ids: bool) -> Piece:
    last = None
    for last in pieces:
        say("".join(f"{i} " for i in last.token_ids) if as_ids else last.text)
    print(flush=True)
    assert last is not None, "a stream without pieces"
    return last


def _report(last: Piece) -> None:
    if last.finish_reason == "error":
        raise last.refused or Failed(last.error or "the engine failed")
    metrics = last.metrics
    assert metrics is not None
    rate = 1 / metrics.time_per_output_token if metrics.time_per_output_token else 0.0
    print(
        f"{metrics.num_prompt_tokens} prompt tokens, first token after {metrics.time_to_first_token:.3f} s,"
        f" {metrics.num_output_tokens} tokens, {rate:.1f} tokens/s, ended by {last.finish_reason}",
        file=sys.stderr,
    )


def _read_prompt(texts: list[str], prompt_ids: str | None, prompt_file: Path | None) -> str | list[int]:
    if len(texts) + (prompt_ids is not None) + (prompt_file is not None) != 1:
        message = "give one of PROMPT, --prompt TEXT, --prompt-ids IDS and --prompt-file PATH"
        raise Refused("missing", "prompt", message=message)
    if prompt_ids is not None:
        return _read_ids(prompt_ids)
    return texts[0] if texts else _read_file(f"--prompt-file {prompt_file}", str(prompt_file))


def _read_file(named: str, path: str) -> str:
    try:
        return utf8(named, sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{named} cannot be read ({error.strerror})"
        raise Refused("not_found", "prompt_file", message=message, way_out="give a readable file") from None
    except UnicodeDecodeError as error:
        raise not_utf8(named, error) from None


def _read_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in re.split(r"\s*,\s*|\s+", text.strip())]
    except ValueError:
        message = f"--prompt-ids is {shown(text)}"
        raise Refused(
            "malformed", "prompt_ids", message=message, way_out="give token ids, such as 5,6,7"
        ) from None
