"""Where compiled kernels are kept, what they are given, and how threads, processes and forks share them."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from hemiola.plugins.cpu import jit
from hemiola.plugins.cpu.simd import MOST_ARGUMENTS, f32, get, get_long, put, put_long


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


def prepare(caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.DEBUG, logger="hemiola"):
        jit.prepare()
    return said(caplog)


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
    (tmp_path / "jit_0/kernel.nbc").touch()
    monkeypatch.setattr(jit, "_CACHE_DIR", tmp_path)
    assert prepare(caplog) == []
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


def keep(item, scratch, size, places, kept):
    """Fill the scratch memory, be slow, and see whether it is still there."""
    put_long(places, item, scratch)
    for i in range(0, size, 8):
        put_long(scratch, i // 8, item)
    for _ in range(20):
        for i in range(0, size, 8):
            if get_long(scratch, i // 8) != item:
                put_long(kept, item, 0)


def show(item, scratch, a, b, c, d, out):
    """What arrives: two numbers, the bits of an fp32 number, and the first number of a tensor."""
    put_long(out, 0, a)
    put_long(out, 1, b)
    put_long(out, 2, c)
    put_long(out, 3, get_long(d, 0))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], jit.Kernel]:
    """Makes kernels that are compiled into a cache of their own, and are not among the engine's."""
    monkeypatch.setattr(jit, "KERNELS", [])
    monkeypatch.setattr(jit, "_CACHE_DIR", tmp_path)
    return jit.Kernel


def test_every_item_runs_exactly_once(
    own: Callable[[Callable], jit.Kernel], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter, counts, guard = own(count), torch.zeros(200_001), 16
    expected = counts.clone()
    for team in (jit._TEAM, None):
        monkeypatch.setattr(jit, "_TEAM", team)
        for num_items in (0, 1, 2, threads, 1000, len(counts) - guard):
            for nanoseconds in (0.0, 1e9):
                counter(num_items, nanoseconds, counts, 3)
                expected[:num_items] += 3
    assert torch.equal(counts, expected)


def test_a_team_is_as_large_as_threads_and_items_allow(
    own: Callable[[Callable], jit.Kernel], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(jit, "_TEAM", lambda function, call, num_threads, flags: started.append(num_threads))
    counter, counts = own(count), torch.zeros(10)
    counter(10, jit.WORTH_A_THREAD, counts, 1)
    counter(1, 1e9, counts, 1)
    counter(0, 1e9, counts, 1)
    assert started == []
    counter(2, 1e9, counts, 1)
    counter(10, jit.WORTH_A_THREAD + 1, counts, 1)
    assert started == ([2, threads] if threads > 1 else [])


def test_a_kernel_with_more_arguments_than_are_passed_is_refused(
    own: Callable[[Callable], jit.Kernel],
) -> None:
    names = ", ".join(f"a{n}" for n in range(MOST_ARGUMENTS + 1))
    with pytest.raises(TypeError, match="takes 31 arguments, more than 30"):
        own(eval(f"lambda item, scratch, {names}: None"))


def test_the_number_of_arguments_is_checked_by_name(own: Callable[[Callable], jit.Kernel]) -> None:
    counter, counts = own(count), torch.zeros(10)
    for wrong in ((), (counts,), (counts, 1, 2)):
        message = rf"^count takes 2 arguments \(counts, step\), not {len(wrong)}$"
        with pytest.raises(TypeError, match=message):
            counter(10, 0.0, *wrong)
    assert (counts == 0).all()


@pytest.mark.parametrize(
    "values",
    [
        (1, -1, 1.5, torch.tensor([7])),
        (True, False, -0.0, torch.tensor([2**62, 1])),
        (np.int64(2**40), np.int32(-3), float("inf"), torch.tensor([5, 6])[1:]),
        (2**63 - 1, -(2**63), 1e-5, torch.tensor([-1])),
    ],
    ids=str,
)
def test_what_a_kernel_gets(own: Callable[[Callable], jit.Kernel], values: tuple) -> None:
    """Numbers of any integer type, the bits of an fp32 number, and a tensor from its own first number on."""
    out = torch.zeros(4, dtype=torch.int64)
    own(show)(1, 0.0, *values, out)
    bits = np.float32(values[2]).view(np.uint32)
    assert out.tolist() == [int(values[0]), int(values[1]), int(bits), values[3][0]]


@pytest.mark.parametrize("value", [np.float32(1), None, "1", [1]], ids=repr)
def test_what_no_kernel_takes_is_refused(own: Callable[[Callable], jit.Kernel], value: object) -> None:
    with pytest.raises(TypeError):
        own(count)(1, 0.0, torch.zeros(1), value)


@pytest.mark.parametrize("size", [8, 72, 4096, 200_000])
def test_scratch_is_a_threads_own(own: Callable[[Callable], jit.Kernel], size: int, threads: int) -> None:
    num_items = max(8, 2_000_000 // size) if size > 1000 else 4000
    places, kept = torch.zeros(num_items, dtype=torch.int64), torch.ones(num_items, dtype=torch.int64)
    own(keep)(num_items, 1e9, size, places, kept, scratch=size)
    assert kept.all()
    rounded = size + -size % 64
    start, memory = jit._LOCAL.buffer.data_ptr(), jit._LOCAL.buffer.numel()
    used = set(((places - start) / rounded).tolist())
    assert used <= set(range(threads)) and memory >= threads * rounded


def test_scratch_is_kept_for_the_next_call(own: Callable[[Callable], jit.Kernel]) -> None:
    keeper, places, kept = own(keep), torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    keeper(1, 0.0, 1 << 20, places, kept, scratch=1 << 20)
    buffer = jit._LOCAL.buffer
    keeper(1, 0.0, 64, places, kept, scratch=64)
    assert jit._LOCAL.buffer is buffer and kept.all()


def test_two_python_threads_do_not_share_scratch(own: Callable[[Callable], jit.Kernel]) -> None:
    keeper, size, num_items = own(keep), 4096, 64
    keeper.compile()

    def call(_: int) -> set[int]:
        used: set[int] = set()
        for _ in range(50):
            places, kept = torch.zeros(num_items).long(), torch.ones(num_items).long()
            keeper(num_items, 1e9, size, places, kept, scratch=size)
            assert kept.all()
            used |= set(places.tolist())
        return used

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(call, range(2))
    assert not one & other


def test_a_kernel_is_compiled_once_and_loaded_by_the_next_process(
    own: Callable[[Callable], jit.Kernel],
) -> None:
    before, entries = jit.config.CACHE_DIR, []
    for _ in range(2):
        jit._compile.cache_clear()  # as if it were another process
        entries.append(own(count).compile())
        assert own(count).compile() is entries[-1]
    assert [entry.cache_hits for entry in entries] == [0, 1]
    assert before == jit.config.CACHE_DIR


NORM = """
import os, sys, torch
from hemiola.plugins.cpu import jit
from hemiola.plugins.norm.compiled import norm
torch.set_num_threads(2)
jit.WORTH_A_THREAD = -1
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


def test_two_processes_compile_into_one_fresh_cache_at_once(tmp_path: Path) -> None:
    save = "torch.save(run(), sys.argv[1] if len(sys.argv) > 1 else os.environ['RESULT'])"
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    check(*(python(save, XDG_CACHE_HOME=str(tmp_path / "cache"), RESULT=str(path)) for path in paths))
    assert len(list((tmp_path / "cache" / "hemiola" / "kernels").iterdir())) == 1
    assert torch.equal(*map(torch.load, paths))
    hit = (
        "entry = next(k for k in jit.KERNELS if k.name == '_norm').compile(); sys.exit(entry.cache_hits != 1)"
    )
    check(python(hit, XDG_CACHE_HOME=str(tmp_path / "cache")))


def test_a_home_that_cannot_be_written_costs_a_folder_that_goes_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    script = "run(); folders = os.listdir(os.environ['TMPDIR']); sys.exit(len(folders) != 1)"
    homes = {"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "temporary")}
    check(python(script, **homes))
    assert not list((tmp_path / "temporary").iterdir())


def test_a_forked_child_neither_hangs_nor_errs() -> None:
    """It has no thread of the pool that its parent used, and here a lock that another thread held."""
    script = """
import signal, threading, time
from hemiola.plugins.gate.compiled import gate  # which is first called in the child
expected = run()
held = threading.Thread(target=lambda: jit._LOCK.__enter__() and time.sleep(60), daemon=True)
held.start()
time.sleep(0.2)
child = os.fork()
if not child:
    signal.alarm(30)
    same = torch.equal(run(), expected) and torch.equal(gate(x, x[:, :1] * 0, "sigmoid"), x / 2)
    os._exit(0 if same else 1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    check(python(script))


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
