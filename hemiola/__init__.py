"""Hemiola compiles hybrid language models (recurrence + attention) into engines and serves them."""

from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file():  # source tree: the packages sit beside this folder, not in it
    __path__.append(str(_checkout))

_homes = {
    "LLM": "llm",
    "SamplingParams": "api",
    "Client": "serving.client",
    "AsyncClient": "serving.aclient",
    "Refused": "errors",
    "Failed": "errors",
    "Busy": "errors",
    "Cancelled": "errors",
    "Lost": "errors",
}


def __getattr__(name: str) -> object:
    if name not in _homes:
        raise AttributeError(f"module 'hemiola' has no attribute {name!r}")
    from hemiola.runtime.extra import lacking

    try:
        home = import_module(f"hemiola.runtime.{_homes[name]}")
    except ModuleNotFoundError as error:
        raise ImportError(lacking(f"hemiola.{name}", error), name=error.name) from None
    return getattr(home, name)
