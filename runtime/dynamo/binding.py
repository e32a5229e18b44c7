"""What a worker takes from ai-dynamo-runtime; nothing else here imports it."""

from collections.abc import Callable
from functools import partial
from importlib import metadata, util
from types import ModuleType
from typing import NamedTuple

from hemiola.runtime.errors import Refused
from hemiola.runtime.extra import install

TESTED = "1.6"


class Errors(NamedTuple):
    """How a request's end is told: the frontend migrates what a lost worker had."""

    invalid: type[Exception]
    lost: type[Exception]
    failed: type[Exception]
    busy: Callable[[str], Exception]  # status 503


class Binding(NamedTuple):
    backend: ModuleType  # dynamo._core.backend
    tokens: object  # the frontend's tokenizer makes token ids
    errors: Errors


def load_binding() -> Binding:
    """Raises Refused where it is missing or of another version."""
    if util.find_spec("dynamo") is None:
        message = "hemiola dynamo-worker needs ai-dynamo-runtime, which is not installed"
        raise Refused("not_found", message=message, way_out=install("dynamo"))
    version = metadata.version("ai-dynamo-runtime")
    if not version.startswith(f"{TESTED}."):
        message = f"ai-dynamo-runtime is {version}, workers are written for {TESTED}"
        raise Refused("unsupported", message=message, way_out=install("dynamo"))
    from dynamo._core import backend  # pyright: ignore[reportMissingImports]  # an extra of its own
    from dynamo.llm import ModelInput  # pyright: ignore[reportMissingImports]
    from dynamo.llm.exceptions import (  # pyright: ignore[reportMissingImports]
        EngineShutdown,
        HttpError,
        InvalidArgument,
        Unknown,
    )

    return Binding(
        backend, ModelInput.Tokens, Errors(InvalidArgument, EngineShutdown, Unknown, partial(HttpError, 503))
    )
