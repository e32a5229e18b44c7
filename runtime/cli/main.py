"""`hemiola generate | inspect | serve | bench`."""

from importlib import import_module

import typer

from hemiola.runtime.cli.command import new_app, run_command

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
COMMANDS = {
    "generate": "Stream one answer",
    "inspect": "Show what an engine is and the memory that it takes",
    "serve": "Start a tritonserver for engines",
    "bench": "Measure an engine under load",
}
app = new_app()


@app.callback()
def _hemiola() -> None:
    """Engines of hybrid language models: run them, look into them, serve them.

    `hemiola COMMAND --help` has a command's options.
    """


def _add(name: str, does: str) -> None:
    """A command that takes all of the command line; its module is imported only when it is called."""

    @app.command(name, context_settings=PASS_ON, add_help_option=False, help=does)
    def run(context: typer.Context) -> None:
        own = new_app()
        own.command()(getattr(import_module(f"hemiola.runtime.cli.{name}"), name))
        status = own(args=context.args, prog_name=context.command_path, standalone_mode=False)
        if isinstance(status, int):
            raise typer.Exit(status)


for _name, _does in COMMANDS.items():
    _add(_name, _does)


def main() -> None:
    """The console entry."""
    run_command(lambda: app(prog_name="hemiola", standalone_mode=False))
