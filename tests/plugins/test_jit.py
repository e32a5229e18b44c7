"""Where compiled kernels are kept, what the log says of it, and that threads share a kernel's items."""

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.grid import needs_numba

from hemiola.plugins import jit

if jit.AVAILABLE:
    from hemiola.plugins.simd import f32, get, put, take, unpack


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
    shutil.copytree(Path(jit.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jit, "__file__", str(copy / "jit.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return copy


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "hemiola"]


def prepare(caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.DEBUG, logger="hemiola"):
        jit.prepare()
    return said(caplog)


def test_prepare_without_numba_says_how_to_get_it(
    kernels: list[Compiled], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "_CACHE_DIR", None)
    monkeypatch.setattr(jit, "MISSING", "No module named 'numba'")
    jit._warn.cache_clear()
    (message,) = prepare(caplog)
    assert (
        "numba cannot be used (No module named 'numba')" in message
        and "pip install 'hemiola[cpu]'" in message
    )
    assert caplog.records[0].levelno == logging.WARNING
    assert [kernel.times for kernel in kernels] == [0, 0]


def test_prepare_says_that_it_compiles_where_nothing_is_kept(
    kernels: list[Compiled],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(jit, "_CACHE_DIR", tmp_path)
    (message,) = prepare(caplog)
    assert message.startswith("compiling the CPU's kernels")
    assert [kernel.times for kernel in kernels] == [1, 1]


def test_prepare_is_silent_where_kernels_are_kept(
    kernels: list[Compiled],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "jit_0").mkdir()
    monkeypatch.setattr(jit, "_CACHE_DIR", tmp_path)
    assert prepare(caplog) == []
    assert [kernel.times for kernel in kernels] == [1, 1]


def test_cache_dir_stays_while_the_sources_stay(sources: Path) -> None:
    folder = jit.cache_dir()
    assert folder.is_dir() and folder.parent == sources.parent / "cache" / "hemiola" / "kernels"
    (sources / "__pycache__").mkdir()
    (sources / "__pycache__" / "jit.pyc").write_text("x")
    assert jit.cache_dir() == folder


@pytest.mark.parametrize("file", ["simd.py", "jit.py", "linear/compiled.py"])
def test_cache_dir_changes_with_a_source(sources: Path, file: str) -> None:
    before = jit.cache_dir()
    text = (sources / file).read_bytes()
    (sources / file).write_bytes(text + b"\n")
    assert jit.cache_dir() != before
    (sources / file).write_bytes(text)
    assert jit.cache_dir() == before


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


def count(call):
    """counts[item] += step"""
    num_items, counts, step = unpack(call, 2)
    while True:
        item = take(call)
        if item >= num_items:
            break
        put(counts, item, get(counts, item) + f32(step))


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> jit.Kernel:
    """Compiled into a cache of its own, and not among the kernels of the engine."""
    monkeypatch.setattr(jit, "KERNELS", [])
    monkeypatch.setattr(jit, "_CACHE_DIR", tmp_path)
    return jit.Kernel(count)


@needs_numba
def test_every_item_runs_exactly_once(
    counter: jit.Kernel, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, guard = np.zeros(200_001, np.float32), 16
    expected = counts.copy()
    for team in (jit._TEAM, None):
        monkeypatch.setattr(jit, "_TEAM", team)
        for num_items in (0, 1, 2, threads, 1000, len(counts) - guard):
            for nanoseconds in (0.0, 1e9):
                counter(num_items, nanoseconds, counts.ctypes.data, 3)
                expected[:num_items] += 3
    assert (counts == expected).all()


@needs_numba
def test_a_team_is_as_large_as_threads_and_items_allow(
    counter: jit.Kernel, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def team(function: int, call: int, num_threads: int, flags: int) -> None:
        started.append(num_threads)

    monkeypatch.setattr(jit, "_TEAM", team)
    counts = np.zeros(10, np.float32)
    counter(10, jit.WORTH_A_THREAD, counts.ctypes.data, 1)
    counter(1, 1e9, counts.ctypes.data, 1)
    counter(0, 1e9, counts.ctypes.data, 1)
    assert started == []
    counter(2, 1e9, counts.ctypes.data, 1)
    counter(10, jit.WORTH_A_THREAD + 1, counts.ctypes.data, 1)
    assert started == ([2, threads] if threads > 1 else [])


@needs_numba
def test_a_kernel_is_compiled_once_and_loaded_by_the_next_process(counter: jit.Kernel) -> None:
    import numba.core.config as config

    before: Any = getattr(config, "CACHE_DIR")  # noqa: B009  numba makes its settings at run time
    assert len(jit.KERNELS) == 1 and jit.KERNELS[0] is counter
    entry = counter.compile()
    assert counter.compile() is entry and entry.cache_hits == 0
    assert jit.Kernel(count).compile().cache_hits == 1
    assert getattr(config, "CACHE_DIR") == before  # noqa: B009


def test_lines_copies_only_what_does_not_lie_in_lines() -> None:
    x = torch.randn(5, 70)
    for kept in (x, x[:, 3:67], x[::2], x[1:], x[:1, :7], x[:0, 3:67], x[:1].expand(4, -1)):
        assert jit.lines(kept) is kept
    for crossed in (x.mT, x[:, ::2]):
        copy = jit.lines(crossed)
        assert copy.is_contiguous() and torch.equal(copy, crossed)
