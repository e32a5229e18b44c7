"""What needs an extra, on a machine that does not have it: one line instead of a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

ENGINE = {"torch", "numba", "safetensors", "tokenizers", "jinja2", "llguidance", "typer", "rich"}
SERVE = {"aiohttp", "tritonclient", "grpc"}  # nvidia-pytriton is not imported
EXTRAS = {"engine": ENGINE, "serve": SERVE}


def lacking(what: str, error: ModuleNotFoundError) -> str:
    """The line, for a module of an extra; the error itself is raised for any other."""
    for extra, modules in EXTRAS.items():
        if error.name in modules:
            return f"{what} needs {error.name}, which is not installed; pip install 'hemiola[{extra}]'"
    raise error


@contextmanager
def or_exit(command: str) -> Iterator[None]:
    """Around a console command and its imports."""
    try:
        yield
    except ModuleNotFoundError as error:
        print(f"error: {lacking(command, error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # while it is imported
        print("interrupted", file=sys.stderr)
        sys.exit(130)
