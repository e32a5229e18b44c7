"""What needs the extra `engine`, on a machine that has only the client: one line instead of a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

ENGINE = {"torch", "numba", "safetensors", "tokenizers", "jinja2", "llguidance", "typer", "rich"}


def lacking(what: str, error: ModuleNotFoundError) -> str:
    """The line, for a module of the extra; the error itself is raised for any other."""
    if error.name not in ENGINE:
        raise error
    return f"{what} needs {error.name}, which is not installed; pip install 'hemiola[engine]'"


@contextmanager
def or_exit(command: str) -> Iterator[None]:
    """Around a console command and its imports."""
    try:
        yield
    except ModuleNotFoundError as error:
        print(f"error: {lacking(command, error)}", file=sys.stderr)
        sys.exit(2)
