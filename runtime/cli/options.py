"""The fields of a model of options as options of a command, by name."""

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from hemiola.runtime.api import Strict
from hemiola.runtime.errors import Refused

Made = TypeVar("Made", bound=Strict)
WORDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "true|false"}


def options_of(
    model: type[Strict], leave_out: Collection[str] = (), defaults: Mapping[str, object] | None = None
) -> list[inspect.Parameter]:
    """A command's parameter for each field, None unless given; `defaults`: where the command has its own."""
    return [
        _parameter(name, field, (defaults or {}).get(name, field.default))
        for name, field in model.model_fields.items()
        if name not in leave_out
    ]


def takes(*groups: list[inspect.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Lets typer see these parameters in place of the command's last one, **options."""

    def extend(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[:-1]
        added = [parameter for group in groups for parameter in group]
        vars(command)["__signature__"] = inspect.Signature(own + added)
        return command

    return extend


def given(model: type[Strict], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the model's options that were given, read as their types say."""
    return {
        name: value if isinstance(value, bool) else read(model, name, value)
        for name, value in options.items()
        if name in model.model_fields and value is not None
    }


def made(model: type[Made], options: Mapping[str, Any]) -> Made:
    """The model of those that were given; what it refuses is named as on the command line."""
    try:
        return model(**given(model, options))
    except Refused as error:
        name, _, reason = str(error).partition(" ")
        raise Refused(f"{_flag(name)} {reason}" if name in model.model_fields else str(error)) from None


def read(model: type[Strict], name: str, text: str | list[str]) -> object:
    """A value as its field's type says; what does not fit stays text, and the model refuses it."""
    field = model.model_fields.get(name)
    annotation = field.annotation if field is not None else str
    if isinstance(text, str):
        return _read_json(name, text) if _is_model(annotation) else _read(annotation, text)
    if get_origin(annotation) is tuple:
        return tuple(_read(get_args(annotation)[0], each) for each in text)
    key, value = get_args(annotation)
    pairs = [each.partition("=") for each in text]
    for before, equals, after in pairs:
        if not equals:
            raise Refused(f"{_flag(name)} is {before + after!r}; write {_metavar(annotation)}")
    return {_read(key, before): _read(value, after) for before, _, after in pairs}


def spelled(value: object) -> str:
    """As it is written on a command line."""
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _read(annotation: Any, text: str) -> object:
    try:
        return TypeAdapter(annotation).validate_strings(text)
    except ValidationError:
        return text


def _is_model(annotation: Any) -> bool:
    """A model of options, or None."""
    return any(isinstance(part, type) and issubclass(part, Strict) for part in get_args(annotation))


def _read_json(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Refused(f"{_flag(name)} is {text[:80]!r}; give JSON") from None


def _parameter(name: str, field: FieldInfo, default: object) -> inspect.Parameter:
    """True or false is a flag, unless it is on already or may be something else."""
    many = get_origin(field.annotation) in (tuple, Mapping)
    is_flag = not default and bool in (field.annotation, *get_args(field.annotation))
    shown = "; may be repeated" if many else f" (default: {spelled(default)})" if default is not None else ""
    option = typer.Option(
        *([f"{_flag(name)}/--no-{_flag(name)[2:]}"] if is_flag else []),
        help=f"{field.description}{'' if is_flag else shown}",
        metavar=None if is_flag else _metavar(field.annotation),
        show_default=False,
    )
    kind = bool if is_flag else list[str] if many else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _metavar(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if _is_model(annotation):
        return "JSON"
    if not parts:
        return WORDS[annotation]
    if origin is Literal:
        return "|".join(parts)
    if origin is tuple:
        return _metavar(parts[0])
    words = [_metavar(part) for part in parts if part is not type(None)]
    return ("=" if origin is Mapping else "|").join(words)
