"""JSON that somebody else wrote, whatever stands in it."""

import json
from pathlib import Path
from typing import Any

from hemiola.runtime.errors import Refused, one_line


def parse_json(text: str) -> Any:
    """The value of a text; whatever is wrong with it is a ValueError that says what."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        raise ValueError("a number of too many digits") from None


def read_json(path: Path, way_out: str) -> Any:
    """What a file holds."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:  # bytes that are no UTF-8, too
        raise Refused(f"{path} cannot be read as JSON ({one_line(error)}); {way_out}") from None
