"""`hemiola generate | inspect | serve | bench`."""

from collections.abc import Callable

import typer

from hemiola.runtime.cli.command import run_command

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _hemiola() -> None:
    """Engines of hybrid language models: run them, look into them, serve them."""


@app.command(context_settings=PASS_ON, add_help_option=False)
def generate(context: typer.Context) -> None:
    """Stream one answer; `hemiola generate --help` has the options."""
    from hemiola.runtime.cli.generate import generate as command

    _run(command, context)


@app.command(context_settings=PASS_ON, add_help_option=False)
def inspect(context: typer.Context) -> None:
    """Show what an engine is and the memory that it takes; `hemiola inspect --help` has the options."""
    from hemiola.runtime.cli.inspect import inspect as command

    _run(command, context)


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
