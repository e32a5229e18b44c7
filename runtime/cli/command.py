"""What every console command does with an error: one line on stderr, and a status that tells whose it was."""

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

import hemiola
from hemiola.runtime.errors import Failed, Refused, one_line

UsageError: Any = typer.BadParameter.__mro__[1]  # click's, which newer typers carry inside themselves


def new_app() -> typer.Typer:
    """Help in plain lines: in a terminal of 80 columns rich's tables cut the names of options."""
    return typer.Typer(
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hemiola {hemiola.__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="show the version", callback=_show_version, is_eager=True)
]


def run_command(command: Callable[[], object]) -> None:
    """Status 2 for what the user can mend, 1 for what failed. A reader that went away gets no complaint."""
    _open_closed_streams()
    try:
        status = command()
        sys.stdout.flush()
        if isinstance(status, int):  # Ctrl-C: typer gives its status back instead of leaving with it
            sys.exit(status)
    except Refused as error:
        _end(str(error), 2)
    except Failed as error:
        _end(str(error), 1)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a bare command; click's status
            print(error.format_message(), file=sys.stderr)
            sys.exit(2)
        path = f"{error.ctx.command_path} " if error.ctx else ""  # none if an option has no value
        message = one_line(error.format_message()).rstrip(".")
        _end(f"{message}; see {path}--help", 2)
    except BrokenPipeError:
        _forget_output()
        sys.exit(1)  # as typer and rich do
    except OSError as error:
        _forget_output()
        _end(f"{error.filename or 'output'}: {error.strerror}" if error.strerror else str(error), 2)
    except typer.Abort:
        sys.exit(130)


def _open_closed_streams() -> None:
    """A stream that the caller has closed (`>&-`) leads nowhere; else a socket would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  # of the lowest number that is free
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _end(message: str, status: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


def _forget_output() -> None:
    """Python would try to write the rest of it at exit, and complain."""
    assert sys.__stdout__ is not None
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.__stdout__.fileno())
