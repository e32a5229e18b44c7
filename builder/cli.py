"""build-engine CHECKPOINT --engine-dir DIR"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hemiola.builder.options import Options
from hemiola.runtime.cli.command import Version, new_app, run_command
from hemiola.runtime.cli.options import made, options_of, takes
from hemiola.runtime.errors import one_line
from hemiola.runtime.progress import show, size

if TYPE_CHECKING:  # torch takes seconds; --help should not
    from hemiola.runtime.manifest import Manifest

app = new_app()


@app.command(no_args_is_help=True)
@takes(options_of(Options))
def build_engine(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", hidden=True)],
    engine_dir: Annotated[
        Path, typer.Option(help="where the engine goes; an older engine there is replaced")
    ],
    version: Version = False,
    **options: Any,
) -> None:
    """Compile CHECKPOINT into an engine directory. CHECKPOINT is a folder in the format of Hugging Face, or a
    name on its Hub: Qwen/Qwen3.5-0.8B. A folder of this name comes first."""
    chosen = made(Options, options)
    with ends_in_one_line(engine_dir) as came:
        manifest = _build(checkpoint, engine_dir, chosen, came)
    Console(markup=False, emoji=False).print(summary(manifest, engine_dir))


class ToldToEnd(KeyboardInterrupt):
    """Where one of the very class came out of `exec`, python -m ends by SIGINT, whatever its status."""


@contextmanager
def ends_in_one_line(engine_dir: Path) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM raise ToldToEnd, so that a build removes what it has made.

    Gives the signals that came: imports and callbacks of C may drop what is raised within them.
    """
    came: list[int] = []

    def end(number: int, frame: object) -> None:
        came.append(number)
        raise ToldToEnd

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    except ToldToEnd:
        print(f"interrupted; no engine was made, and {engine_dir} is as it was before", file=sys.stderr)
        raise typer.Exit(128 + came[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _build(checkpoint: Path, engine_dir: Path, options: Options, came: list[int]) -> "Manifest":
    """And say what it does."""
    with show(True) as display:

        def report(stage: str, done: int, total: int) -> None:
            if came:
                raise ToldToEnd
            display(stage, done, total)

        report("starting", 0, 0)
        from hemiola.builder.build import build  # takes seconds

        return build(checkpoint, engine_dir, options, report)


def summary(manifest: "Manifest", engine_dir: Path) -> Table:
    """What was built, for people."""
    from hemiola.runtime.cli.inspected import PROMISES, runs
    from hemiola.runtime.config import state_bytes

    limits = manifest.limits
    table = Table(title=one_line(engine_dir), show_header=False, title_justify="left")
    kinds = {kind: manifest.layers.count(kind) for kind in dict.fromkeys(manifest.layers)}
    table.add_row("model", manifest.architecture)
    table.add_row("layers", ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    table.add_row("runs on", f"{manifest.target} {manifest.arch}")
    for segment in manifest.segments:
        if segment.pieces:
            num_bytes = sum((engine_dir / file).stat().st_size for file in segment.files)
            table.add_row(segment.name, f"{runs(segment)}, {size(num_bytes)}")
    for op, why in manifest.callbacks.items():
        table.add_row("", f"{op}: python callback ({why})")
    if manifest.promise == "tokens":
        table.add_row("promise", PROMISES[manifest.promise])
    table.add_row(
        "drafts", f"{manifest.drafts}, {limits.num_drafts} at most" if limits.num_drafts else "none"
    )
    table.add_row("longest request", f"{limits.max_len} tokens")
    table.add_row("one step", f"{limits.max_rows} requests, {limits.max_step_tokens} tokens")
    table.add_row("one page", f"{limits.page_len} tokens, {size(state_bytes(manifest.states, 'page'))}")
    table.add_row("one slot", size(state_bytes(manifest.states, "slot")))
    on_disk = sum(file.stat().st_size for file in engine_dir.rglob("*") if file.is_file())
    table.add_row("on disk", size(on_disk))
    return table


def main() -> None:
    """Console entry: one line on stderr and exit code 2 for anything that the user can mend."""
    run_command(lambda: app(prog_name="build-engine", standalone_mode=False))
