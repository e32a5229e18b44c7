"""`hemiola generate | chat | inspect | serve | dynamo-worker | bench`."""

import os
import sys
from importlib import import_module

import typer

from hemiola.runtime.cli.command import Version, new_app, run_command

COMMANDS = {
    "generate": "Stream one answer",
    "chat": "Talk to a model in the terminal",
    "inspect": "Show what an engine is and the memory that it takes",
    "serve": "Start a tritonserver for engines",
    "dynamo-worker": "Serve an engine as a worker of NVIDIA Dynamo",
    "bench": "Measure an engine under load",
}
PROMPTED = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # a shell that completes a command says so far what it has


def new_main(words: list[str]) -> typer.Typer:
    """The command for this command line. Only the module of the command that it names is imported."""
    app = new_app()

    @app.callback()
    def _hemiola(version: Version = False) -> None:
        """Engines of hybrid language models: run them, look into them, serve them.

        `hemiola COMMAND --help` has a command's options.
        """

    wanted = next((word for word in words if not word.startswith("-")), "")
    for name, does in COMMANDS.items():
        if name == wanted:
            module = name.replace("-", "_")
            command = getattr(import_module(f"hemiola.runtime.cli.{module}"), module)
            app.command(name, no_args_is_help=True)(command)
        else:
            app.command(name, help=does)(_other)
    return app


def _other() -> None:
    """Stands for a command that this command line does not name."""


def _words() -> list[str]:
    if "_HEMIOLA_COMPLETE" in os.environ:
        return next((os.environ[name].split()[1:] for name in PROMPTED if name in os.environ), [])
    return sys.argv[1:]


def main() -> None:
    """The console entry."""
    run_command(lambda: new_main(_words())(prog_name="hemiola", standalone_mode=False))
