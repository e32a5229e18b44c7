"""The fields of a model of options as options of a command, by name."""

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, ParameterInfo

from hemiola.runtime.api import Strict
from hemiola.runtime.errors import Door, Name, Refused, as_option, in_python, one_line, shown
from hemiola.runtime.json_file import parse_json

Made = TypeVar("Made", bound=Strict)
WORDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: "true|false"}
# Paths as typer gets them: of an empty one it would make the folder that the command is called in.
TEXT_OF: dict[Any, Any] = {Path: str, Path | None: str | None, list[Path] | None: list[str] | None}
# safetensors and tokenizers open what has a name in UTF-8.
FOLDERS = ("--engine-dir", "--random-weights", "CHECKPOINT")


def options_of(
    model: type[Strict], leave_out: Collection[str] = (), defaults: Mapping[str, object] | None = None
) -> list[inspect.Parameter]:
    """A command's parameter for each field, None unless given; `defaults`: where the command has its own."""
    fields = {name: field for name, field in model.model_fields.items() if name not in leave_out}
    return [
        _parameter(name, field, (defaults or {}).get(name, field.default), fields)
        for name, field in fields.items()
    ]


def takes(*groups: list[inspect.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Lets typer see these parameters in place of the command's last one, **options. Texts and paths come
    checked, and what is refused is named as on the command line."""

    def extend(command: Callable[..., None]) -> Callable[..., None]:
        parameters = list(inspect.signature(command).parameters.values())[:-1]
        added = [parameter for group in groups for parameter in group]
        names = [parameter.name for parameter in added]
        paths = [parameter.name for parameter in parameters + added if _is_path(parameter)]
        named = {parameter.name: _named(parameter) for parameter in parameters + added}

        @wraps(command)
        def run(*arguments: object, **options: object) -> None:
            checked = {name: _checked(named[name], value, name in paths) for name, value in options.items()}
            try:
                command(*arguments, **checked)
            except Refused as error:
                raise error.renamed(options_named(names)) from None

        run.__annotations__ = {}  # typer would believe them rather than the signature
        vars(run)["__signature__"] = inspect.Signature(
            [_for_typer(parameter) for parameter in parameters + added]
        )
        return run

    return extend


def options_named(names: Collection[str]) -> Door:
    """The door of a command: these fields, and what is within them, are written as its options."""

    def write(name: Name) -> str:
        head = re.split(r"[.[]", name.field, maxsplit=1)[0]
        if head not in names:
            return in_python(name)
        return as_option(Name(f"{_flag(head)[2:]}{name.field[len(head) :]}", name.value))

    return write


def engine_and_rest(engine_dir: Path | None, *words: str | None) -> tuple[Path, list[str]]:
    """The engine, by --engine-dir or as the first argument, and the arguments behind it."""
    rest = [word for word in words if word is not None]
    if engine_dir is None and not rest:
        way_out = "pass its folder as the first argument, or as --engine-dir"
        raise Refused("missing", "engine_dir", message="no engine is given", way_out=way_out)
    if engine_dir is None and not rest[0]:
        raise Refused("missing", "engine_dir", message="ENGINE is empty", way_out="give a folder")
    return (Path(rest.pop(0)) if engine_dir is None else engine_dir), rest


def only_engine(engine_dir: Path | None, engine: str | None) -> Path:
    """For commands that take no other argument."""
    folder, rest = engine_and_rest(engine_dir, engine)
    if rest:
        message = f"--engine-dir {folder} and {shown(rest[0])} were both given"
        raise Refused("conflict", "engine_dir", message=message, way_out="drop one")
    return folder


def utf8(named: str, text: str) -> str:
    """Python hands on other bytes of a command line, and in some locales of stdin, as lone surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(named, error) from None


def not_utf8(named: str, error: UnicodeDecodeError) -> Refused:
    message = f"{named} is not UTF-8 ({error.reason} at byte {error.start})"
    return Refused("malformed", named, message=message, way_out="convert it")


def given(model: type[Strict], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the model's options that were given, read as their types say."""
    return {
        name: value if isinstance(value, bool | Path) else read(model, name, value)
        for name, value in options.items()
        if name in model.model_fields and value is not None
    }


def made(model: type[Made], options: Mapping[str, Any]) -> Made:
    """The model of those that were given."""
    return model(**given(model, options))


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
            raise Refused("malformed", name, before + after, way_out=f"write {_metavar(annotation)}")
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
        return parse_json(text)
    except ValueError as error:
        limit = f"which is not JSON ({one_line(error)})"
        raise Refused("malformed", name, text, limit, "give JSON") from None


def _checked(named: str, value: object, is_path: bool) -> object:
    if isinstance(value, list):
        return [_checked(named, each, is_path) for each in value]
    if not isinstance(value, str):
        return value
    if not is_path:
        return utf8(named, value)
    if not value:
        kind = "folder" if named in FOLDERS else "file"
        raise Refused("missing", named, message=f"{named} is empty", way_out=f"give a {kind}")
    return Path(utf8(named, value) if named in FOLDERS else value)


def _named(parameter: inspect.Parameter) -> str:
    """As users know it: an argument by its word in the usage, an option by its flag."""
    info = get_args(parameter.annotation)[1]
    return str(info.metavar) if isinstance(info, ArgumentInfo) else _flag(parameter.name)


def _is_path(parameter: inspect.Parameter) -> bool:
    kind, info = get_args(parameter.annotation)
    return kind in TEXT_OF and isinstance(info, ParameterInfo)


def _for_typer(parameter: inspect.Parameter) -> inspect.Parameter:
    kind, info = get_args(parameter.annotation)
    if info.metavar is None and kind in (str, str | None, list[str] | None):
        info.metavar = WORDS[str]
    if not _is_path(parameter):
        return parameter
    info.metavar = info.metavar or WORDS[Path]
    return parameter.replace(annotation=Annotated[TEXT_OF[kind], info])


def _parameter(name: str, field: FieldInfo, default: object, options: Collection[str]) -> inspect.Parameter:
    """True or false is a flag, unless it is on already or may be something else. options: of the command, by
    which its description names them."""
    many = get_origin(field.annotation) in (tuple, Mapping)
    is_flag = not default and bool in (field.annotation, *get_args(field.annotation))
    shown = "; may be repeated" if many else f" (default: {spelled(default)})" if default is not None else ""
    option = typer.Option(
        *([f"{_flag(name)}/--no-{_flag(name)[2:]}"] if is_flag else []),
        help=f"{_with_flags(str(field.description), options)}{'' if is_flag else shown}",
        metavar=None if is_flag else _metavar(field.annotation),
        show_default=False,
    )
    is_path = Path in (field.annotation, *get_args(field.annotation))
    kind = bool if is_flag else list[str] if many else Path if is_path else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


MAX_METAVAR = 40  # columns


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _with_flags(text: str, options: Collection[str]) -> str:
    """`see memory_fraction` as `see --memory-fraction`."""
    return re.sub(r"\w*_\w+", lambda word: _flag(word[0]) if word[0] in options else word[0], text)


def _metavar(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if _is_model(annotation):
        return "JSON"
    if not parts:
        return WORDS[annotation]
    if origin is Literal:
        names = "|".join(parts)
        return names if len(names) <= MAX_METAVAR else "NAME"  # then the description has them
    if origin is tuple:
        return _metavar(parts[0])
    words = [_metavar(part) for part in parts if part is not type(None)]
    return ("=" if origin is Mapping else "|").join(words)
