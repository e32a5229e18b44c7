"""`hemiola generate | inspect | serve | bench`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from hemiola.runtime.cli.command import run_command

if TYPE_CHECKING:  # torch takes seconds; --help should not
    from hemiola.runtime.manifest import Manifest

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
EngineDir = Annotated[Path, typer.Option(help="made by build-engine")]


@app.callback()
def _hemiola() -> None:
    """Engines of hybrid language models: run them, look into them, serve them."""


@app.command(context_settings=PASS_ON, add_help_option=False)
def generate(context: typer.Context) -> None:
    """Stream one answer; `hemiola generate --help` has the options."""
    from hemiola.runtime.cli.generate import generate as command

    _run(command, context)


@app.command()
def inspect(engine_dir: EngineDir) -> None:
    """Show what an engine is, after checking that it is whole."""
    from hemiola.runtime import manifest

    found = manifest.load(engine_dir)
    console = Console()
    console.print(_facts(engine_dir, found))
    console.print(_states(found))
    console.print(_segments(engine_dir, found))
    console.print(_forms(found))


def _facts(engine_dir: Path, found: "Manifest") -> Table:
    table = Table(title=str(engine_dir), show_header=False)
    kinds = ", ".join(f"{found.layers.count(kind)} {kind}" for kind in dict.fromkeys(found.layers))
    weights = engine_dir / found.weights_file
    for name, value in {
        "architecture": found.architecture,
        "layers": f"{len(found.layers)}: {kinds}",
        "vocabulary, hidden": f"{found.vocab_size}, {found.hidden_size}",
        "target, architecture": f"{found.target}, {found.arch}",
        "drafts": found.drafts,
        "tokenizer": "tokenizer.json" if found.has_tokenizer else "none: takes and gives token ids",
        "end tokens": ", ".join(map(str, found.eos_ids)),
        **{name: str(value) for name, value in found.limits.model_dump().items()},
        "weights": _size(weights.stat().st_size),
        **({"random weights": f"{_size(found.drawn_bytes)}, drawn when opened"} if found.drawn else {}),
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
        size = _size(sum((engine_dir / file).stat().st_size for file in segment.files))
        counts = str(len(segment.weights)), str(len(segment.states))
        files = segment.file or f"{len(segment.files)} parts"
        table.add_row(segment.name, files, size, *counts, " ".join(segment.inputs))
    return table


def _forms(found: "Manifest") -> Table:
    table = Table(title="ops, the form that each runs in, and why better ones refused")
    for column in ("segment", "op", "form", "calls", "refused"):
        table.add_column(column, justify="right" if column == "calls" else "left")
    for segment in found.segments:
        kinds = [
            (node.op, node.form, "; ".join(f"{form}: {why}" for form, why in node.refused.items()))
            for node in segment.nodes
        ]
        for op, form, refused in sorted(set(kinds)):
            table.add_row(segment.name, op, form, str(kinds.count((op, form, refused))), refused)
    return table


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


@app.command(context_settings=PASS_ON, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Start a tritonserver for engines; `hemiola serve --help` has the options."""
    from hemiola.runtime.cli.serve import serve as command

    _run(command, context)


@app.command(context_settings=PASS_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure an engine under load; `hemiola bench --help` has the options."""
    from hemiola.runtime.cli.bench import bench as command

    _run(command, context)


def _run(command: Callable[..., None], context: typer.Context) -> None:
    """A command that is imported only when it is called: it takes all of the command line."""
    own = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    own.command()(command)
    status = own(args=context.args, prog_name=context.command_path, standalone_mode=False)
    if isinstance(status, int):
        raise typer.Exit(status)


def main() -> None:
    """The console entry."""
    run_command(lambda: app(prog_name="hemiola", standalone_mode=False))
