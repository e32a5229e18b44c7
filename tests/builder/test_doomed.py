"""Builds that run out of disk or memory, or are told to end: one line, no engine, and the next one works.

Each in a process of its own. A limit on a file's size stands for a full disk.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit.doomed import Doomed

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is for Linux on x86-64")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")

SIZES = ("--max-len", "64", "--max-rows", "2", "--max-step-tokens", "32", "--drafts", "none")
CPU = ("--target", "torch", "--arch", "cpu")
GPU = ("--target", "torch", "--arch", "sm_89")
RTX = ("--target", "tensorrt-rtx", "--arch", "sm_89")
FULL = "cannot be written (File too large); free space or choose another directory"
SHORT = "error: this machine has too little memory for the build ("
KIB = 1 << 10


@pytest.fixture(scope="module")
def doomed() -> Iterator[Doomed]:
    made = Doomed()
    yield made
    made.close()


@pytest.fixture
def command(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> tuple[str, ...]:
    return (str(tiny_checkpoint("qwen3_5")), "--engine-dir", str(tmp_path / "engine"), *SIZES)


@pytest.mark.parametrize(
    ("target", "limit"),
    [
        pytest.param(CPU, 100 * KIB, id="torch's program"),
        pytest.param(GPU, 4 * KIB, id="a tokenizer"),
        pytest.param(RTX, 1024 * KIB, id="a part"),
    ],
)
def test_a_full_disk_is_one_line(
    doomed: Doomed, command: tuple[str, ...], tmp_path: Path, target: tuple[str, ...], limit: int
) -> None:
    """torch's own writer of programs would abort the process."""
    ended = doomed.build(*command, *target, limit=("RLIMIT_FSIZE", limit))
    assert ended == (2, [f"error: --engine-dir {tmp_path / 'engine'} {FULL}"])
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("target", [CPU, GPU, RTX], ids=["cpu", "gpu", "rtx"])
def test_too_little_memory_is_one_line(
    doomed: Doomed, command: tuple[str, ...], tmp_path: Path, target: tuple[str, ...]
) -> None:
    ended = doomed.build(*command, *target, limit=("RLIMIT_AS", 20 * 1024 * KIB))
    assert ended.status == 2 and ended.said[-1].startswith(SHORT), ended
    assert not (tmp_path / "engine").exists()


AT_WORK = pytest.mark.parametrize(
    ("target", "stage"),
    [(CPU, "writing weights"), (GPU, "kernels for sm_89"), (RTX, "trunk: part 2 of")],
    ids=["cpu", "gpu", "rtx"],
)


@AT_WORK
@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_what_is_told_to_end_does_not_end_without_a_word(
    doomed: Doomed, command: tuple[str, ...], tmp_path: Path, target: tuple[str, ...], stage: str,
    number: str, status: int,
) -> None:  # fmt: skip
    """Ctrl-C, and what stops a container or a job."""
    said = f"interrupted; no engine was made, and {tmp_path / 'engine'} is as it was before"
    assert doomed.build(*command, *target, end=(number, stage)) == (status, [said])
    assert not [*tmp_path.iterdir()]


@AT_WORK
def test_what_is_killed_leaves_nothing_that_the_next_build_does_not_remove(
    doomed: Doomed, command: tuple[str, ...], tmp_path: Path, target: tuple[str, ...], stage: str
) -> None:
    """kill -9: what it leaves is no engine, and goes with the next build of any kind."""
    assert doomed.build(*command, *target, end=("SIGKILL", stage)).status == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".engine.building-")
    assert doomed.build(*command, *CPU).status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
