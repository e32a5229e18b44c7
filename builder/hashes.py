"""The sha256 of files, which takes a second for each gigabyte or two: every part is reported."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from hemiola.runtime.progress import Report

PART = 2**24  # bytes that are hashed between two reports


def hash_files(paths: Sequence[Path], stage: str, report: Report) -> list[str]:
    """Of each file, in hexadecimal digits."""
    total, done, hashes = sum(path.stat().st_size for path in paths), 0, []
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(PART):
                digest.update(part)
                done += len(part)
                report(stage, done, total)
        hashes.append(digest.hexdigest())
    return hashes
