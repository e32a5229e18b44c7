"""What needs an extra, on a machine that does not have it: one line instead of a traceback."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from shlex import quote

import hemiola

ENGINE = {
    "torch",
    "numba",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "typer",
    "rich",
}
SERVE = {"aiohttp", "tritonclient", "grpc"}  # nvidia-pytriton is not imported
EXTRAS = {"engine": ENGINE, "serve": SERVE, "nixl": {"nixl"}}


def lacking(what: str, error: ModuleNotFoundError) -> str:
    """The line, for a module of an extra; the error itself is raised for any other."""
    for extra, modules in EXTRAS.items():
        if error.name in modules:
            return f"{what} needs {error.name}, which is not installed; {install(extra)}"
    raise error


def install(extra: str) -> str:
    """The command that adds an extra. Hemiola is on no package index: it comes from where it came from."""
    checkout = Path(hemiola.__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {quote(f'{checkout}[{extra}]')}"
    origin = _origin()
    if not origin:
        return f"install hemiola[{extra}] from where hemiola came"
    return f"pip install {quote(f'hemiola[{extra}] @ {origin}')}"


def _origin() -> str:
    """The wheel, folder or repository from which pip installed hemiola (PEP 610); "" where it did not say."""
    try:
        direct = json.loads(metadata.distribution("hemiola").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        direct = {}
    if "url" not in direct:
        return ""
    repository = direct.get("vcs_info")
    return f"{repository['vcs']}+{direct['url']}@{repository['commit_id']}" if repository else direct["url"]


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
