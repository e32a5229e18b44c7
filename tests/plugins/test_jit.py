"""Where compiled kernels are kept, what they are given, and how threads, processes and forks share them."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numba
import pytest
import torch

from hemiola.plugins.cpu import jit
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import f32, get, put


class Compiled:
    """Stands for a kernel; counts how often it was compiled."""

    def __init__(self) -> None:
        self.times = 0

    def compile(self) -> None:
        self.times += 1


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    made = [Compiled(), Compiled()]
    monkeypatch.setattr(jit, "KERNELS", made)
    return made


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the plugins, which the cache's folder is then named after; the user's cache is elsewhere."""
    copy = tmp_path / "plugins"
    shutil.copytree(Path(jit.__file__).parent.parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jit, "__file__", str(copy / "cpu" / "jit.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return copy


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "hemiola"]


def test_prepare_compiles_all_kernels(kernels: list[Compiled]) -> None:
    jit.prepare()
    assert [kernel.times for kernel in kernels] == [1, 1]


def test_cache_dir_stays_while_the_sources_stay(sources: Path) -> None:
    folder = jit.cache_dir()
    assert folder.is_dir() and folder.parent == sources.parent / "cache" / "hemiola" / "kernels"
    (sources / "__pycache__").mkdir()
    (sources / "__pycache__" / "jit.pyc").write_text("x")
    assert jit.cache_dir() == folder


@pytest.mark.parametrize("file", ["cpu/simd.py", "cpu/jit.py", "linear/compiled.py"])
def test_cache_dir_changes_with_a_source(sources: Path, file: str) -> None:
    before = jit.cache_dir()
    text = (sources / file).read_bytes()
    (sources / file).write_bytes(text + b"\n")
    assert jit.cache_dir() != before
    (sources / file).write_bytes(text)
    assert jit.cache_dir() == before


def test_folders_that_nobody_has_used_for_long_are_removed(sources: Path) -> None:
    """Not the own one, whose files are as old; and nothing that is not ours."""
    own = jit.cache_dir()
    names = {"0123456789abcdef": 31, "fedcba9876543210": 29, "somebody's": 400, own.name: 31}
    for name, days in names.items():
        (own.parent / name).mkdir(exist_ok=True)
        (own.parent / name / "kernel.nbc").touch()
        os.utime(own.parent / name, (time.time() - 86400 * days,) * 2)
    for _ in range(2):  # the second time as another process would
        assert jit.cache_dir() == own
        left = sorted(folder.name for folder in own.parent.iterdir() if (folder / "kernel.nbc").exists())
        assert left == sorted(set(names) - {"0123456789abcdef"})
    assert time.time() - own.stat().st_mtime < 60, "it is used now"


def test_cache_dir_is_in_the_home_without_xdg(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(sources.parent / "home"))
    for unset in ("XDG_CACHE_HOME", None):
        monkeypatch.delenv(unset) if unset else monkeypatch.setenv("XDG_CACHE_HOME", "")
        assert jit.cache_dir().is_relative_to(sources.parent / "home" / ".cache" / "hemiola")


def test_cache_dir_that_cannot_be_made_is_temporary(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, temporary = sources.parent / "file", sources.parent / "temporary"
    file.write_text("")
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for root in (file, file / "below"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(root))
        folder = jit.cache_dir()
        assert folder.is_dir() and folder.parent == temporary
    assert file.read_text() == ""


def count(item, scratch, counts, step):
    """counts[item] += step"""
    put(counts, item, get(counts, item) + f32(step))


def other_count(item, scratch, counts, step):
    """counts[item] += 2 * step"""
    put(counts, item, get(counts, item) + f32(step) + f32(step))


def test_a_kernel_is_compiled_once_and_loaded_by_the_next_process(
    own: Callable[[Callable], Kernel],
) -> None:
    before, entries = jit.config.CACHE_DIR, []
    for _ in range(2):
        jit._compile.cache_clear()  # as if it were another process
        entries.append(own(count).compile())
        assert own(count).compile() is entries[-1]
    assert [entry.cache_hits for entry in entries] == [0, 1]
    assert before == jit.config.CACHE_DIR


def test_a_first_run_is_not_silent_because_a_kernel_was_compiled_before_prepare(
    own: Callable[[Callable], Kernel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "KERNELS", [])
    for kept in (False, True):
        jit._compile.cache_clear()  # as if it were another process
        jit._say_that_it_takes_long.cache_clear()
        caplog.clear()
        assert own(count).address and own(other_count).address
        jit.prepare()
        place = f"; kept in {jit._CACHE_DIR}"
        assert [words.endswith(place) for words in said(caplog)] == ([] if kept else [True])


NORM = """
import os, sys, torch
from hemiola.plugins.cpu import jit
from hemiola.plugins.norm.compiled import norm
torch.set_num_threads(2)
x = torch.arange(16_000.0)  # few enough for torch to compare them without its own threads
x = x.view(-1, 16)
def run():
    return norm(x, torch.empty(0), torch.ones(16), 1e-5, 16, False)
"""


def python(script: str, **environment: str) -> subprocess.Popen:
    root = str(Path(__file__).parent.parent.parent)
    environment = os.environ | {"PYTHONPATH": root} | environment
    return subprocess.Popen([sys.executable, "-c", NORM + script], env=environment)


def check(*processes: subprocess.Popen) -> None:
    try:
        assert [process.wait(timeout=300) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()


def test_of_two_processes_with_one_fresh_cache_one_compiles_what_both_want(tmp_path: Path) -> None:
    kernel = "next(k for k in jit.KERNELS if k.name == '_norm').compile().cache_hits"
    save = f"torch.save((run(), {kernel}), os.environ['RESULT'])"
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    check(*(python(save, XDG_CACHE_HOME=str(tmp_path / "cache"), RESULT=str(path)) for path in paths))
    assert len(list((tmp_path / "cache" / "hemiola" / "kernels").iterdir())) == 1
    (one, hits), (other, hits_of_other) = map(torch.load, paths)
    assert torch.equal(one, other) and {hits, hits_of_other} == {0, 1}


def test_a_home_that_cannot_be_written_costs_a_folder_that_goes_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    script = "run(); folders = os.listdir(os.environ['TMPDIR']); sys.exit(len(folders) != 1)"
    homes = {"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "temporary")}
    check(python(script, **homes))
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("ending", ["nbc", "nbi"])
def test_damaged_files_of_the_cache_are_made_again(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "_CACHE_DIR", tmp_path)
    signature = numba.types.void(*[numba.types.int64] * 4)

    def compiled() -> int:
        return jit._cached(lambda: numba.cfunc(signature, cache=True, error_model="numpy")(count)).cache_hits

    assert (compiled(), compiled()) == (0, 1)
    for file in tmp_path.rglob(f"*.{ending}"):
        file.write_bytes(file.read_bytes()[:60])
    assert (compiled(), compiled()) == (0, 1)
    assert "damaged" in said(caplog)[0]
