"""A copy of an engine as a stranger would change it, and each way in which a value of it can be wrong."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

from kit.hostile import Opener

from hemiola.runtime import manifest
from hemiola.runtime.errors import Refused
from hemiola.runtime.outline import FILE

MADE = "made-by-code"  # in the engine's folder's parent, if any code runs
CODE = "__import__('pathlib').Path('{made}').touch()"
DEEP: Any = json.loads("[" * 200 + "]" * 200)
# Each way in which a value can be wrong.
WRONG: dict[str, Any] = {
    "null": None, "true": True, "minus": -1, "zero": 0, "past 32 bits": 2**31, "past 64 bits": 2**64,
    "2**60": 2**60, "fraction": 1.5, "nan": float("nan"), "infinity": float("inf"), "empty": "",
    "number as text": "7", "above": "../../x", "absolute": "/etc/passwd", "nul": "a\0b", "line": "a\nb",
    "escape": "\x1b]0;a\x07",
    "code": CODE, "input of code": "x=" + CODE, "dunder": "__class__", "long": "x" * 10_000,
    "library": "load_library", "list": [], "object": {}, "deep": DEEP, "many": [2**31 - 1] * 9,
}  # fmt: skip

Path_ = tuple[str | int, ...]


class Stranger:
    """A copy of an engine whose files are changed and signed anew."""

    def __init__(self, source: Path, folder: Path, opener: Opener) -> None:
        self.source, self.opener, self.made = source, opener, folder / MADE
        self.dir = folder / "engine"
        self.reset()
        self.expected = opener.open_sound(source)
        assert "tokens" in self.expected, self.expected

    def reset(self) -> None:
        shutil.rmtree(self.dir, ignore_errors=True)
        shutil.copytree(self.source, self.dir)

    def content(self) -> dict[str, Any]:
        return json.loads((self.source / FILE).read_text())

    def sign(self) -> str | None:
        """Hashes and identity agree again with what the files say; or why the manifest is refused."""
        try:
            found = manifest.parse(self.dir / FILE)
            hashes = {
                name: hashlib.sha256((self.dir / name).read_bytes()).hexdigest()
                if (self.dir / name).is_file()
                else digest
                for name, digest in found.sha256.items()
            }
        except Refused as error:
            return str(error)
        found.model_copy(update={"sha256": hashes}).write(self.dir)
        return None

    def outcome(self, sign: bool = True) -> dict[str, Any]:
        refused = self.sign() if sign else None
        found = {"refused": refused} if refused else self.opener.open(self.dir)
        assert not self.made.exists(), f"code ran: {found}"
        if "refused" in found:
            said = found["refused"]
            assert said.isprintable() and len(said) < 1200 and "; " in said, said
        else:
            assert "tokens" in found, found.get("error", found)
        return found

    def change(self, name: str, change: Callable[[bytes], bytes]) -> None:
        path = self.dir / name
        path.write_bytes(change((self.source / name).read_bytes()))


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Of the leaves and what holds them: of a list its first, of equal entries one."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in list(value):
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def put(value: Any, path: Path_, new: Any) -> Any:
    """A copy with that in this place; all else is shared."""
    copied = at = copy(value)
    for step in path[:-1]:
        at[step] = at = copy(at[step])
    at[path[-1]] = new
    return copied


def all_places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    if path:
        yield path
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, part in entries:
        yield from all_places(part, (*path, key))
