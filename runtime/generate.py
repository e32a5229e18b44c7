"""`hemiola generate`"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from hemiola.runtime.engine_options import add_engine_options, given
from hemiola.runtime.errors import Failed, Refused
from hemiola.runtime.request import Piece, SamplingParams

LONE_REQUEST = {"max_rows": 1}


def generate(
    engine_dir: Annotated[Path, typer.Option(help="made by build-engine")],
    prompt: Annotated[str | None, typer.Option(help="text to go on from")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="IDS", help="token ids to go on from, answered in token ids")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="read the prompt from a file; - is stdin")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="the prompt is a user's message")] = False,
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate")] = 128,
    min_tokens: Annotated[int, typer.Option(help="nothing ends the text before so many tokens")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="draw from the best tokens with this much probability")] = 1.0,
    top_k: Annotated[int, typer.Option(help="draw from so many best tokens; 0 is all")] = 0,
    min_p: Annotated[float, typer.Option(help="draw from tokens this likely, relative to the best")] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(help="same seed, same text; in fast numerics a draw at a rounding border may flip"),
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="of tokens of the prompt and the output; above 1: fewer repetitions")
    ] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="of tokens of the output")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="of tokens of the output, each time")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=VALUE", help="add to a token's logit; may be repeated")
    ] = None,
    bad_words: Annotated[list[str] | None, typer.Option(help="never written; may be repeated")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be repeated")] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option(help="end at this token; may be repeated")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="do not end at the end token")] = False,
    **engine_options: str | None,
) -> None:
    """Stream one answer to stdout; counts and speed go to stderr."""
    from hemiola.runtime.llm import LLM

    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_read_biases(logit_bias or ()),
        bad_words=tuple(bad_words or ()),
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_ids or ()),
        ignore_eos=ignore_eos,
    )
    asked = _read_prompt(prompt, prompt_ids, prompt_file)
    if chat and prompt_ids is not None:
        raise Refused("--chat makes text a user's message; drop it, or give --prompt TEXT")
    with LLM(engine_dir, **LONE_REQUEST, **given(engine_options)) as llm:
        if chat:
            asked = llm.chat_text([{"role": "user", "content": asked}])
        last = _show(llm.stream(asked, params), as_ids=prompt_ids is not None)
    _report(last)


add_engine_options(generate, leave_out=LONE_REQUEST)


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


def _read_biases(texts: Sequence[str]) -> dict[int, float]:
    biases = {}
    for text in texts:
        token_id, _, value = text.partition("=")
        try:
            biases[int(token_id)] = float(value)
        except ValueError:
            raise Refused(f"--logit-bias is {text!r}; give a token id and a number, such as 5=-100") from None
    return biases


def _read_prompt(prompt: str | None, prompt_ids: str | None, prompt_file: Path | None) -> str | list[int]:
    if [prompt, prompt_ids, prompt_file].count(None) != 2:
        raise Refused("give one of --prompt TEXT, --prompt-ids IDS and --prompt-file PATH")
    if prompt is not None:
        return prompt
    if prompt_ids is not None:
        return _read_ids(prompt_ids)
    try:
        return (
            sys.stdin.read()
            if str(prompt_file) == "-"
            else Path(str(prompt_file)).read_text(encoding="utf-8")
        )
    except OSError as error:
        raise Refused(
            f"--prompt-file {prompt_file} cannot be read ({error.strerror}); give a readable file"
        ) from None
    except UnicodeDecodeError as error:
        raise Refused(
            f"--prompt-file {prompt_file} is not UTF-8 ({error.reason} at byte {error.start}); convert it"
        ) from None


def _read_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise Refused(f"--prompt-ids is {text!r}; give token ids, such as 5,6,7") from None
