"""Where an engine goes: a directory that appears whole or not at all, and takes nobody's files away."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hemiola.builder.checkpoint import read_json
from hemiola.runtime import manifest
from hemiola.runtime.errors import Refused


def refuse_occupied(engine_dir: Path) -> None:
    if engine_dir.exists() and not engine_dir.is_dir():
        raise Refused(f"--engine-dir {engine_dir} is a file; choose a directory")
    if engine_dir.is_dir() and any(engine_dir.iterdir()) and not (engine_dir / manifest.FILE).is_file():
        raise Refused(
            f"--engine-dir {engine_dir} has files but no engine in it; choose an empty or a new directory"
        )
    if (engine_dir / manifest.FILE).is_file():
        for stray in manifest.strays(engine_dir, _files_of(engine_dir / manifest.FILE)):
            raise Refused(
                f"--engine-dir {engine_dir} has an engine and beside it {stray}, which a new engine would"
                " remove; move it, or choose another directory"
            )


def _files_of(path: Path) -> Iterable[str]:
    """What a manifest of any version names; a damaged one names nothing."""
    try:
        return read_json(path).get("sha256", {})
    except Refused:
        return ()


@contextmanager
def fresh(engine_dir: Path) -> Iterator[Path]:
    """A folder beside `engine_dir` that takes its place at the end, or vanishes."""
    engine_dir = engine_dir.resolve()
    try:
        engine_dir.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{engine_dir.name}-", dir=engine_dir.parent))
    except OSError as error:
        raise Refused(
            f"--engine-dir {engine_dir} cannot be written ({error.strerror}); choose another directory"
        ) from None
    old = folder.with_name(folder.name + "-old")
    try:
        yield folder
        folder.chmod(0o755)
        if engine_dir.exists():
            engine_dir.rename(old)
        folder.rename(engine_dir)
    except OSError as error:
        raise Refused(
            f"--engine-dir {engine_dir} cannot be written ({error.strerror}); "
            "free space or choose another directory"
        ) from None
    finally:
        if old.exists() and not engine_dir.exists():
            old.rename(engine_dir)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
