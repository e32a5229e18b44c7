"""The file of the disk cache: who may open it, and the headers of its units."""

import base64
import errno
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

from hemiola.runtime.api import MAX_CHARACTERS
from hemiola.runtime.errors import Refused

BLOCK = 4096  # bytes
MAX_SALT = 32 + 4 * MAX_CHARACTERS["cache_salt"]  # bytes; see PrefixCache.chain
MAGIC = "hemiola prefix 2"


def header_bytes(page_len: int) -> int:
    """Blocks for a page's tokens, of four bytes each, and the longest salt, in base64, and for the rest."""
    texts = len(to_text(bytes(4 * page_len))) + len(to_text(bytes(MAX_SALT)))
    return -(-(texts + 1024) // BLOCK) * BLOCK


def open_file(path: Path, num_bytes: int) -> int:
    """A file of this size that nobody else has open."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"{path} cannot be opened ({error.strerror})"
        raise Refused("in_use", "disk_cache_dir", message=message, way_out="name a folder of yours") from None
    try:
        _check(file, path)
        if os.fstat(file).st_size != num_bytes:
            _resize(file, num_bytes)
    except OSError as error:
        os.close(file)
        message = f"{path} cannot grow to {num_bytes} bytes ({error.strerror})"
        raise Refused("exhausted", "disk_cache_bytes", message=message, way_out="lower it") from None
    except Refused:
        os.close(file)
        raise
    return file


def _resize(file: int, num_bytes: int) -> None:
    """To an empty file. One that there is no room for takes none from others on the disk."""
    os.ftruncate(file, 0)  # units of another size mean nothing
    disk = os.fstatvfs(file)
    if num_bytes > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        os.ftruncate(file, 0)  # ext4 keeps what it had found
        raise


def _check(file: int, path: Path) -> None:
    status = os.fstat(file)
    is_ours = status.st_uid == os.geteuid() and status.st_nlink == 1  # else another file is cut, too
    if not stat.S_ISREG(status.st_mode) or not is_ours:
        message = f"{path} is not a file of yours"
        raise Refused("in_use", "disk_cache_dir", message=message, way_out="name another folder")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_used = isinstance(error, BlockingIOError)
        why = "is used by another process" if is_used else f"cannot be locked ({error.strerror})"
        message = f"{path} {why}"
        raise Refused("in_use", "disk_cache_dir", message=message, way_out="name another folder") from None


def parsed(header: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(header.rstrip(b"\0"))
        wanted = {
            "form": str,
            "key": str,
            "parent": str,
            "tokens": str,
            "salt": str,
            "edge": int,
            "kind": str,
        }
        is_ours = isinstance(fields, dict) and fields.get("magic") == MAGIC
        whole = is_ours and all(type(fields.get(name)) is kind for name, kind in wanted.items())
        for name in ("tokens", "salt") if whole else ():
            to_bytes(fields[name])
        return fields if whole and (fields["part"] is None or type(fields["part"]) is int) else None
    except (ValueError, RecursionError, KeyError):
        return None


def to_text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def to_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
