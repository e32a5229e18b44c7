"""`hemiola generate | inspect | serve | bench`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hemiola.runtime.errors import Refused

if TYPE_CHECKING:  # torch takes seconds; --help should not
    from hemiola.runtime.manifest import Manifest
    from hemiola.runtime.request import Piece

UsageError: Any = typer.BadParameter.__mro__[1]  # click's, which newer typers carry inside themselves
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
EngineDir = Annotated[Path, typer.Option(help="made by build-engine")]


@app.callback()
def _hemiola() -> None:
    """Engines of hybrid language models: run them, look into them, serve them."""


@app.command()
def generate(
    engine_dir: EngineDir,
    prompt: Annotated[str | None, typer.Option(help="text to go on from")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="read the prompt from a file; - is stdin")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="the prompt is a user's message")] = False,
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="draw from the best tokens with this much probability")] = 1.0,
    top_k: Annotated[int, typer.Option(help="draw from so many best tokens; 0 is all")] = 0,
    min_p: Annotated[float, typer.Option(help="draw from tokens this likely, relative to the best")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="same seed, same text")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be repeated")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="do not end at the end token")] = False,
) -> None:
    """Stream one answer to stdout; counts and speed go to stderr."""
    from hemiola.runtime.llm import LLM
    from hemiola.runtime.request import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    text = _read_prompt(prompt, prompt_file)
    with LLM(engine_dir, max_rows=1) as llm:
        if chat:
            text = llm.chat_text([{"role": "user", "content": text}])
        last = None
        for last in llm.stream(text, params):
            print(last.text, end="", flush=True)
    print()
    assert last is not None, "a stream without pieces"
    _report(last)


def _report(last: "Piece") -> None:
    if last.finish_reason == "error":
        raise RuntimeError(last.error)
    metrics = last.metrics
    assert metrics is not None
    rate = 1 / metrics.time_per_output_token if metrics.time_per_output_token else 0.0
    print(
        f"{metrics.num_prompt_tokens} prompt tokens, first token after {metrics.time_to_first_token:.3f} s,"
        f" {metrics.num_output_tokens} tokens, {rate:.1f} tokens/s, ended by {last.finish_reason}",
        file=sys.stderr,
    )


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise Refused("give one of --prompt TEXT and --prompt-file PATH")
    if prompt is not None:
        return prompt
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


@app.command()
def inspect(engine_dir: EngineDir) -> None:
    """Show what an engine is, after checking that it is whole."""
    from hemiola.runtime import manifest

    found = manifest.load(engine_dir)
    console = Console()
    console.print(_facts(engine_dir, found))
    console.print(_states(found))
    console.print(_segments(engine_dir, found))


def _facts(engine_dir: Path, found: "Manifest") -> Table:
    table = Table(title=str(engine_dir), show_header=False)
    kinds = ", ".join(f"{found.layers.count(kind)} {kind}" for kind in dict.fromkeys(found.layers))
    weights = engine_dir / found.weights_file
    for name, value in {
        "architecture": found.architecture,
        "layers": f"{len(found.layers)}: {kinds}",
        "vocabulary, hidden": f"{found.vocab_size}, {found.hidden_size}",
        "target, architecture": f"{found.target}, {found.arch}",
        "numerics": found.numerics,
        "drafts": found.drafts,
        "end tokens": ", ".join(map(str, found.eos_ids)),
        **{name: str(value) for name, value in found.limits.model_dump().items()},
        "weights": f"{len(found.weights)} tensors, {_size(weights.stat().st_size)} stored",
        "built by": f"hemiola {found.builder_version}, torch {found.torch_version}",
        "identity": found.identity[:16],
    }.items():
        table.add_row(name, value)
    return table


def _states(found: "Manifest") -> Table:
    from hemiola.runtime.config import state_bytes

    slot, page = (state_bytes(found.states, kind) for kind in ("slot", "page"))
    table = Table(
        title=f"states: {_size(slot)} per slot, {_size(page)} per page of {found.limits.page_len} tokens"
    )
    for column in ("state", "kind", "shape of one", "dtype", "bytes of one"):
        table.add_column(column, justify="right" if column.startswith("bytes") else "left")
    for state in found.states:
        table.add_row(
            state.name,
            state.kind,
            "x".join(map(str, state.shape)),
            state.dtype,
            f"{state_bytes([state], state.kind):,}",
        )
    return table


def _segments(engine_dir: Path, found: "Manifest") -> Table:
    table = Table(title="segments")
    for column in ("segment", "file", "size", "weights", "states", "inputs"):
        table.add_column(column)
    for segment in found.segments:
        size = _size((engine_dir / segment.file).stat().st_size)
        counts = str(len(segment.weights)), str(len(segment.states))
        table.add_row(segment.name, segment.file, size, *counts, " ".join(segment.inputs))
    return table


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


@app.command(context_settings=PASS_ON, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Start a tritonserver for engines; `hemiola serve --help` has the options."""
    from hemiola.runtime.serve import serve_command

    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(serve_command)
    command(args=context.args, prog_name="hemiola serve", standalone_mode=False)


@app.command(context_settings=PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure an engine under load; `hemiola bench --help` has the options."""
    from hemiola.runtime.bench import command

    command.main(context.args)


def main() -> None:
    """Errors are one line on stderr and exit status 2."""
    try:
        app(prog_name="hemiola", standalone_mode=False)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except UsageError as error:
        print(f"error: {' '.join(error.format_message().split())}; see hemiola --help", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
