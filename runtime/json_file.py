"""JSON that somebody else wrote, whatever stands in it."""

import json
from pathlib import Path
from typing import Any

from hemiola.runtime.errors import Refused, one_line


def parse_json(text: str, unique: bool = False) -> Any:
    """The value of a text; whatever is wrong with it is a ValueError that says what. unique: no object has a
    key twice, of which other readers would take another one."""
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except (json.JSONDecodeError, Repeated):
        raise
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        raise ValueError("a number of too many digits") from None


class Repeated(ValueError):
    """A key stands twice in one object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise Repeated(f"the key {key[:60]!r} stands twice in one object")
        made[key] = value
    return made


def check_size(path: Path, way_out: str, most_bytes: int) -> None:
    """Refuses what is larger: a file may have holes, and terabytes that take no place."""
    if (size := path.stat().st_size) > most_bytes:
        message = f"{path} has {size} bytes, at most {most_bytes} are read"
        raise Refused("too_long", message=message, way_out=f"{way_out}")


def read_text(path: Path, way_out: str, most_bytes: int | None = None) -> str:
    """A text of at most so many bytes."""
    if most_bytes is not None:
        check_size(path, way_out, most_bytes)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"{path} cannot be read as JSON ({one_line(error)})"
        raise Refused("malformed", message=message, way_out=f"{way_out}") from None


def read_json(
    path: Path,
    way_out: str,
    most_bytes: int | None = None,
    unique: bool = False,
    most_brackets: int | None = None,
) -> Any:
    """What a file holds. unique: see parse_json. most_brackets: empty lists take fifty times their bytes."""
    text = read_text(path, way_out, most_bytes)
    if most_brackets is not None and (num := text.count("[") + text.count("{")) > most_brackets:
        message = f"{path} has {num} brackets, at most {most_brackets} are read"
        raise Refused("too_long", message=message, way_out=f"{way_out}")
    try:
        return parse_json(text, unique)
    except ValueError as error:
        message = f"{path} cannot be read as JSON ({one_line(error)})"
        raise Refused("malformed", message=message, way_out=f"{way_out}") from None
