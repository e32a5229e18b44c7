"""Hemiola compiles hybrid language models (recurrence + attention) into engines and serves them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hemiola.runtime.api import SamplingParams
    from hemiola.runtime.errors import Busy, Cancelled, Failed, Lost, Refused
    from hemiola.runtime.llm import LLM
    from hemiola.runtime.serving.aclient import AsyncClient
    from hemiola.runtime.serving.client import Client

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncClient",
    "Busy",
    "Cancelled",
    "Client",
    "Failed",
    "Lost",
    "Refused",
    "SamplingParams",
]

# Imported when they are wanted: LLM takes torch, a client does without.
_HOMES = {
    "LLM": "llm",
    "SamplingParams": "api",
    "Client": "serving.client",
    "AsyncClient": "serving.aclient",
    **dict.fromkeys(("Refused", "Failed", "Busy", "Cancelled", "Lost"), "errors"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hemiola' has no attribute {name!r}")
    from hemiola.runtime.extra import lacking

    try:
        home = import_module(f"hemiola.runtime.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        raise ImportError(lacking(f"hemiola.{name}", error), name=error.name) from None
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
