"""The files of an engine directory, compared with what its manifest says of them."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from hemiola.runtime.errors import Refused, one_line


def check_files(engine_dir: Path, sha256: Mapping[str, str], manifest: str) -> None:
    """Refuses an engine of which a file is missing, was changed, leads elsewhere or was added."""
    for name, expected in sha256.items():
        _check_inside(engine_dir, name)
        _check_file(engine_dir / name, expected)
    _check_strays(engine_dir, sha256, manifest)


def _check_inside(engine_dir: Path, name: str) -> None:
    """A link, of a file or of a folder above it, may lead to any file of the user's."""
    path = engine_dir.resolve() / name
    if path.exists() and path.resolve() != path:
        message = f"{engine_dir / name} is a link, which might lead out of the engine directory"
        raise Refused("damaged", message=message, way_out="copy the engine with cp -rL")


def check_regular(path: Path) -> None:
    if path.is_symlink():
        raise Refused("damaged", message=f"{path} is a link", way_out="copy the engine with cp -rL")
    if not path.is_file():
        wrong = "no regular file" if path.exists() else "missing"
        raise Refused("damaged", message=f"{path} is {wrong}", way_out="run build-engine again")


def _check_file(path: Path, expected: str) -> None:
    check_regular(path)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != expected:
        message = f"{path} was changed after the build (sha256 {sha256[:12]}, expected {expected[:12]})"
        raise Refused("damaged", message=message, way_out="run build-engine again")


def _check_strays(engine_dir: Path, sha256: Mapping[str, str], manifest: str) -> None:
    """Beside a tokenizer's files another one, such as a chat template, would be read."""
    folders = {Path(name).parent for name in sha256} - {Path()}
    for name in strays(engine_dir, [manifest, *sha256]):
        if Path(name).parent in folders:
            message = f"{one_line(engine_dir / name)} was not there when the engine was built"
            raise Refused("damaged", message=message, way_out="remove it, or run build-engine again")


def strays(engine_dir: Path, known: Iterable[str]) -> list[str]:
    """What is in an engine's directory and not its own: files, links, pipes, folders that nobody can list."""
    found, folders = set[str](), [""]
    while folders:  # a stranger's may lie deeper in each other than calls may
        folder = folders.pop()
        try:
            with os.scandir(engine_dir / folder) as entries:
                for entry in entries:
                    name = f"{folder}{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{name}/")
                    else:
                        found.add(name)
        except OSError:
            found.add(folder or ".")
    return sorted(found - set(known))
