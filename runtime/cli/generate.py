"""`hemiola generate`"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.cli.options import given, options_of, takes
from hemiola.runtime.config import ServeConfig
from hemiola.runtime.errors import Failed, Refused

LONE_REQUEST = {"max_rows": 1}
DEFAULTS: dict[str, Any] = {"max_tokens": 128}
NOT_OF_ONE_ANSWER = ("bad_words_ids", "logprobs", "num_drafts", "priority", "cache_salt")


@takes(options_of(SamplingParams, NOT_OF_ONE_ANSWER, DEFAULTS), options_of(ServeConfig, LONE_REQUEST))
def generate(
    engine_dir: Annotated[Path, typer.Option(help="made by build-engine")],
    prompt: Annotated[str | None, typer.Option(help="text to go on from")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="IDS", help="token ids to go on from, answered in token ids")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="read the prompt from a file; - is stdin")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="the prompt is a user's message")] = False,
    **options: Any,
) -> None:
    """Stream one answer to stdout; counts and speed go to stderr."""
    from hemiola.runtime.llm import LLM

    params = SamplingParams(**DEFAULTS | given(SamplingParams, options))
    asked = _read_prompt(prompt, prompt_ids, prompt_file)
    if chat and prompt_ids is not None:
        raise Refused("--chat makes text a user's message; drop it, or give --prompt TEXT")
    with LLM(engine_dir, **LONE_REQUEST, **given(ServeConfig, options)) as llm:
        if chat:
            asked = llm.chat_text([{"role": "user", "content": asked}])
        last = _show(llm.stream(asked, params), as_ids=prompt_ids is not None)
    _report(last)


def _show(pieces: Iterable[Piece], as_ids: bool) -> Piece:
    last = None
    for last in pieces:
        print("".join(f"{i} " for i in last.token_ids) if as_ids else last.text, end="", flush=True)
    print(flush=True)
    assert last is not None, "a stream without pieces"
    return last


def _report(last: Piece) -> None:
    if last.finish_reason == "error":
        raise Failed(last.error or "the engine failed")
    metrics = last.metrics
    assert metrics is not None
    rate = 1 / metrics.time_per_output_token if metrics.time_per_output_token else 0.0
    print(
        f"{metrics.num_prompt_tokens} prompt tokens, first token after {metrics.time_to_first_token:.3f} s,"
        f" {metrics.num_output_tokens} tokens, {rate:.1f} tokens/s, ended by {last.finish_reason}",
        file=sys.stderr,
    )


def _read_prompt(prompt: str | None, prompt_ids: str | None, prompt_file: Path | None) -> str | list[int]:
    if [prompt, prompt_ids, prompt_file].count(None) != 2:
        raise Refused("give one of --prompt TEXT, --prompt-ids IDS and --prompt-file PATH")
    if prompt_ids is not None:
        return _read_ids(prompt_ids)
    named = "--prompt" if prompt_file is None else f"--prompt-file {prompt_file}"
    try:
        text = prompt if prompt is not None else _read_file(str(prompt_file))
        # Python hands on what is no UTF-8 on a command line, and in some locales on stdin, as lone surrogates
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except OSError as error:
        raise Refused(
            f"--prompt-file {prompt_file} cannot be read ({error.strerror}); give a readable file"
        ) from None
    except UnicodeDecodeError as error:
        raise Refused(f"{named} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from None


def _read_file(path: str) -> str:
    return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")


def _read_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise Refused(f"--prompt-ids is {text!r}; give token ids, such as 5,6,7") from None
