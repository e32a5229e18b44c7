"""Files that a server may have open."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hemiola.runtime.errors import Refused
from hemiola.runtime.serving import files, heartbeat

RAISED = """
import resource
from hemiola.runtime.serving import files
soft, hard = map(int, input().split())
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
files.raise_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], files.most_connections())
"""


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "most"), [(300, 4000, 4000, 936), (300, 300, 300, 37), (1024, 1024, 1024, 192)]
)
def test_a_server_stays_with_the_files_of_a_shell(soft: int, hard: int, raised: int, most: int) -> None:
    """1024 of them, and as many idle connections ended it."""
    assert hard <= resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    ran = subprocess.run(
        [sys.executable, "-c", RAISED],
        input=f"{soft} {hard}",
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert list(map(int, ran.stdout.split())) == [raised, most]


def test_a_server_without_files_fills_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64, tritonserver wrote 2.6 million lines in 20 s."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(Refused, match=r"may have 64 files open .*, and a server needs 256"):
        files.raise_limit()


def test_an_engine_is_lost_when_shared_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as --hang-timeout; anybody may fill it."""

    def write_text(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path, beat = tmp_path / "m", heartbeat.now(0.0, 0.0, 1, "a longer one")
    heartbeat.write(path, beat)
    monkeypatch.setattr(Path, "write_text", write_text)
    for last in (beat._replace(time=beat.time + 9, failure=""), beat._replace(failure="b" * 500)):
        heartbeat.write(path, last)
        assert heartbeat.read(path) == last


def test_an_engine_is_lost_when_its_launcher_has_no_file_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m"
    heartbeat.write(path, heartbeat.now(0.0, 0.0, 1, ""))
    assert heartbeat.trouble(path, 30) == "" and heartbeat._alive(os.getpid())
    plain = Path.read_text
    for unreadable in ("/proc", "/"):

        def read_text(own: Path, beginning: str = unreadable) -> str:
            if str(own).startswith(beginning):
                raise OSError(errno.EMFILE, "Too many open files")
            return plain(own)

        monkeypatch.setattr(Path, "read_text", read_text)
        assert heartbeat.trouble(path, 30) == ""
    dead = heartbeat.Beat(2**22 + 1, 1e18, 0.0, 0.0, 1, "")
    monkeypatch.undo()
    path.write_text(json.dumps(dead))
    assert "has ended" in heartbeat.trouble(path, 30)
