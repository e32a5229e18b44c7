"""Options of an engine as options of a command: those of ServeConfig, by name."""

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import typer

from hemiola.runtime.config import ServeConfig


def add_engine_options(command: Callable[..., None], leave_out: Collection[str] = ()) -> None:
    """Lets typer see ServeConfig's fields in place of the command's last parameter, **engine_options."""
    own = list(inspect.signature(command).parameters.values())[:-1]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None, typer.Option(help=f"{field.description} (default: {spelled(field.default)})")
            ],
        )
        for name, field in ServeConfig.model_fields.items()
        if name not in leave_out
    ]
    vars(command)["__signature__"] = inspect.Signature(own + options)


def given(engine_options: Mapping[str, str | None]) -> dict[str, Any]:
    """Those that were given: numbers and booleans by their JSON spelling, the rest as text."""
    return {name: parse_value(text) for name, text in engine_options.items() if text is not None}


def spelled(value: object) -> str:
    """As it is written on a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def parse_value(text: str) -> object:
    """JSON, or else the word itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
