"""build-engine CHECKPOINT --engine-dir DIR"""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hemiola.runtime.cli.command import run_command

if TYPE_CHECKING:  # torch takes seconds; --help should not
    from hemiola.runtime.manifest import Manifest


class Drafts(StrEnum):
    none = "none"
    ngram = "ngram"
    mtp = "mtp"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def build_engine(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face checkpoint folder")],
    engine_dir: Annotated[
        Path, typer.Option(help="where the engine goes; an older engine there is replaced")
    ],
    target: Annotated[str, typer.Option(help="what runs the engine")] = "torch",
    arch: Annotated[str, typer.Option(help="the device it runs on")] = "cpu",
    max_len: Annotated[
        int | None,
        typer.Option(help="longest prompt + output; default: what the checkpoint knows, at most 8192"),
    ] = None,
    max_rows: Annotated[int, typer.Option(help="requests in one step")] = 64,
    max_step_tokens: Annotated[int, typer.Option(help="tokens in one step")] = 2048,
    drafts: Annotated[
        Drafts | None, typer.Option(help="who proposes tokens; default: mtp if the checkpoint has it")
    ] = None,
    num_drafts: Annotated[
        int | None, typer.Option(help="most drafts of one request in one step; default: 3, or 0 without")
    ] = None,
    page_len: Annotated[int, typer.Option(help="tokens in a page of keys and values")] = 64,
    chunk_len: Annotated[int, typer.Option(help="tokens between two edges of the recurrence grid")] = 16,
) -> None:
    """Compile a checkpoint into an engine directory."""
    from hemiola.builder.build import Options, build

    options = Options(
        target=target,
        arch=arch,
        max_len=max_len,
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        drafts=None if drafts is None else drafts.value,
        num_drafts=num_drafts,
        page_len=page_len,
        chunk_len=chunk_len,
    )
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<18}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None, amount="")

        def report(stage: str, done: int, total: int) -> None:
            amount = f"{_mib(done)} of {_mib(total)}" if total else ""
            progress.update(task, description=stage, completed=done, total=total or None, amount=amount)

        manifest = build(checkpoint, engine_dir, options, report)
    Console().print(summary(manifest, engine_dir))


def summary(manifest: "Manifest", engine_dir: Path) -> Table:
    """What was built, for people."""
    limits = manifest.limits
    table = Table(title=str(engine_dir), show_header=False, title_justify="left")
    kinds = {kind: manifest.layers.count(kind) for kind in dict.fromkeys(manifest.layers)}
    table.add_row("model", manifest.architecture)
    table.add_row("layers", ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    table.add_row("runs on", f"{manifest.target} {manifest.arch}")
    table.add_row(
        "drafts", f"{manifest.drafts}, {limits.num_drafts} at most" if limits.num_drafts else "none"
    )
    table.add_row("longest request", f"{limits.max_len} tokens")
    table.add_row("one step", f"{limits.max_rows} requests, {limits.max_step_tokens} tokens")
    table.add_row("one page", f"{limits.page_len} tokens, {_mib(_state_bytes(manifest, 'page'))}")
    table.add_row("one slot", _mib(_state_bytes(manifest, "slot")))
    table.add_row(
        "on disk", _mib(sum(file.stat().st_size for file in engine_dir.rglob("*") if file.is_file()))
    )
    return table


def _state_bytes(manifest: "Manifest", kind: str) -> int:
    total = 0
    for state in (state for state in manifest.states if state.kind == kind):
        size = 4
        for length in state.shape:
            size *= length
        total += size
    return total


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"


def main() -> None:
    """Console entry: one line on stderr and exit code 2 for anything that the user can mend."""
    run_command(lambda: app(prog_name="build-engine", standalone_mode=False))
