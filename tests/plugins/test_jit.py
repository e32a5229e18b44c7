"""Where compiled kernels are kept, what they are given, and how threads, processes and forks share them."""

import grp
import os
import pwd
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import llvmlite
import numba
import pytest
import torch

from hemiola.plugins.cpu import cache, jit
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.registers import CPU
from hemiola.plugins.cpu.simd import f32, get, put


class Compiled:
    """Stands for a kernel; counts how often it was compiled."""

    def __init__(self, kept: bool) -> None:
        self.times, self._kept = 0, kept

    def is_kept(self) -> bool:
        return self._kept

    def compile(self) -> None:
        self.times += 1


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    made = [Compiled(True), Compiled(False), Compiled(False)]
    monkeypatch.setattr(jit, "KERNELS", made)
    return made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache is elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the plugins, of which kernels are then made."""
    package = tmp_path / "elsewhere"
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(jit.__file__).parent.parent, package / "plugins", ignore=unwanted)
    monkeypatch.setattr(cache, "PACKAGE", package)
    return package / "plugins"


def digest(file: Path) -> str:
    """As another process would have it."""
    cache.sources.cache_clear()
    return cache.sources(file)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "hemiola"]


def test_prepare_compiles_all_kernels_and_counts_those_that_no_earlier_process_has(
    kernels: list[Compiled],
) -> None:
    counted: list[tuple[int, int]] = []
    jit.prepare(lambda done, total: counted.append((done, total)))
    assert all(kernel.times for kernel in kernels)
    assert counted == [(0, 2), (1, 2), (1, 2), (2, 2)]


def test_cache_dir_depends_on_the_cpu_and_the_compilers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache.cache_dir()
    assert folder.is_dir() and folder.parent == home / "cache" / "hemiola" / "kernels"
    assert cache.cache_dir() == folder
    for module, name, value in [
        (cache, "CPU", (*CPU[:2], CPU[2] + ",+more")),
        (numba, "__version__", "1.0"),
        (llvmlite, "__version__", "1.0"),
    ]:
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            assert cache.cache_dir() != folder
    assert cache.cache_dir() == folder


def test_kernels_do_not_depend_on_the_path_of_their_source(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server imports the package through a new folder at each start, and compiled every kernel again."""
    before = digest(copy / "linear" / "compiled.py")
    moved = copy.parent.with_name("moved")
    copy.parent.rename(moved)
    monkeypatch.setattr(cache, "PACKAGE", moved)
    assert digest(moved / "plugins" / "linear" / "compiled.py") == before


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("cpu/simd.py", True),
        ("attention/compiled.py", True),
        ("attention/spans.py", True),  # it imports that
        ("attention/tiles.py", True),  # constants are part of the code
        ("cpu/activations.py", True),  # imported by what it imports
        ("linear/compiled.py", False),
        ("attention/triton.py", False),
    ],
)
def test_kernels_depend_on_what_their_module_imports(copy: Path, file: str, changes: bool) -> None:
    before = digest(copy / "attention" / "compiled.py")
    text = (copy / file).read_bytes()
    (copy / file).write_bytes(text + b"\n")
    assert (digest(copy / "attention" / "compiled.py") != before) == changes
    (copy / file).write_bytes(text)
    assert digest(copy / "attention" / "compiled.py") == before


def test_every_form_of_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PACKAGE", tmp_path)
    (tmp_path / "room").mkdir()
    for name in ("a", "b", "c", "d", "e", "f", "__init__", "unused"):
        (tmp_path / "room" / f"{name}.py").touch()
    text = """
import hemiola.room.a
from hemiola.room.b import x
from hemiola.room import c, nothing
from hemiola.room import (
    d,  # why
    e as other,
)
def f():
    from hemiola.room.f import y
# import hemiola.room.unused
"""
    names = {file.stem for file in cache._imports(text)}
    assert names == {"a", "b", "c", "d", "e", "f", "__init__"}


def test_folders_that_nobody_has_used_for_long_are_removed(home: Path) -> None:
    """Not the own one, whose files are as old; and nothing that is not ours."""
    own = cache.cache_dir()
    names = {"0123456789abcdef": 31, "fedcba9876543210": 29, "somebody's": 400, own.name: 31}
    for name, days in names.items():
        (own.parent / name).mkdir(exist_ok=True)
        (own.parent / name / "kernel.nbc").touch()
        os.utime(own.parent / name, (time.time() - 86400 * days,) * 2)
    for _ in range(2):  # the second time as another process would
        assert cache.cache_dir() == own
        left = sorted(folder.name for folder in own.parent.iterdir() if (folder / "kernel.nbc").exists())
        assert left == sorted(set(names) - {"0123456789abcdef"})
    assert time.time() - own.stat().st_mtime < 60, "it is used now"


def test_old_versions_of_a_module_are_removed_when_there_are_many(tmp_path: Path) -> None:
    """Those that somebody used in the last hour stay: a process may write there."""
    hours = {f"m.one-{number:016x}": number / 2 for number in range(20)}
    others = {
        "m.one.more-0123456789abcdef": 900,
        "m.one-0123456789abcdef.lock": 900,
        "m.two-" + 16 * "a": 900,
    }
    for name, age in {**hours, **others}.items():
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - 3600 * age,) * 2)
    newest = tmp_path / f"m.one-{'f' * 16}"
    cache._use(newest)
    left = {folder.name for folder in tmp_path.iterdir()}
    assert left == {newest.name, *others, *[name for name, age in hours.items() if age < 3.5]}


def test_cache_dir_is_in_the_home_without_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in (False, True):
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        if unset:
            monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache.cache_dir().is_relative_to(tmp_path / ".cache" / "hemiola")


def test_kernels_are_loaded_from_the_folder_that_somebody_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    (tmp_path / "stranger").mkdir()
    monkeypatch.chdir(tmp_path / "stranger")
    assert (found := cache.cache_dir()) and found.is_relative_to(tmp_path / "home")
    assert not list((tmp_path / "stranger").iterdir())


def test_everybody_may_exchange_the_folder_that_kernels_are_loaded_from(home: Path) -> None:
    own = cache.cache_dir()
    home.chmod(0o1777)
    assert cache.cache_dir() == own
    home.chmod(0o777)
    assert cache.cache_dir() is None


LEVELS = [".", "hemiola", "hemiola/kernels", "own"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["owner", "mode", "group", "sticky"])
def test_kernels_are_loaded_from_a_folder_that_others_write_to(
    home: Path, monkeypatch: pytest.MonkeyPatch, level: str, how: str
) -> None:
    """They are pickles: who may write them runs code in our name."""
    own, real = cache.cache_dir(), cache._owners
    folder = own if level == "own" else home / "cache" / level
    if how == "owner":
        theirs = {os.geteuid() + 1}
        monkeypatch.setattr(cache, "_owners", lambda path: theirs if path == folder else real(path))
    else:
        monkeypatch.setattr(cache, "_is_private", lambda group: False)
        folder.chmod({"mode": 0o777, "group": 0o775, "sticky": 0o1777}[how])
    found = cache.cache_dir()
    assert found == (own if how == "sticky" and level != "own" else None)


def test_kernels_that_are_kept_under_a_loose_umask_are_anybodys(home: Path) -> None:
    """Others could write into the folders of modules, which nobody looks at."""
    own = cache.cache_dir()
    assert own.is_relative_to(home) and stat.S_IMODE(own.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("group", "name", "members", "is_private"),
    [
        (0, "root", ["a", "b"], True),
        (500, "me", [], True),
        (500, "me", ["me"], True),
        (500, "users", [], False),
        (500, "me", ["me", "you"], False),
        (600, "me", [], False),
        (700, "", [], False),
    ],
)
def test_a_group_of_several_users_is_taken_for_the_users_own(
    group: int, name: str, members: list[str], is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(number: int) -> SimpleNamespace:
        if not name:
            raise KeyError(number)
        return SimpleNamespace(gr_name=name, gr_mem=members)

    monkeypatch.setattr(grp, "getgrgid", found)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_name="me", pw_gid=500))
    assert cache._is_private(group) is is_private


def test_without_a_folder_that_can_be_made_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for root in (file, file / "below"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(root))
        assert cache.cache_dir() is None
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


def test_a_kernel_that_is_loaded_does_not_wait_for_a_process_that_compiles_it(
    own: Callable[[Callable], Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = own(count)
    kernel.compile()

    def held(name: str) -> None:
        raise AssertionError("it waits for the lock")

    monkeypatch.setattr(jit, "_alone", held)
    assert kernel.address == kernel.compile().address


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


FULL = """
import logging, resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["ROOM"]),) * 2)
said = []
logging.getLogger("hemiola").warning = lambda words, *values: said.append(words % values)
kernel = next(kernel for kernel in jit.KERNELS if kernel.name == "_norm")
assert torch.equal(run(), run()) and kernel.is_kept()
assert [words.partition(",")[0] for words in said[-1:]] == ["compiling kernels for this CPU"], said
assert [words.endswith("set XDG_CACHE_HOME to another folder") for words in said[:-1]] == [True], said
"""


@pytest.mark.parametrize("room", [0, 8192])
def test_a_full_disk_opens_no_engine_whose_kernels_are_not_kept(tmp_path: Path, room: int) -> None:
    """None of a file, or the beginning of one, can be written."""
    check(python(FULL, XDG_CACHE_HOME=str(tmp_path), ROOM=str(room)))
    assert not list(tmp_path.rglob("*.nbc"))
    check(python("run()", XDG_CACHE_HOME=str(tmp_path)))  # there is room again, and nothing is damaged
    assert list(tmp_path.rglob("*.nbc"))


def test_a_home_that_cannot_be_written_costs_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    script = "os.chdir(os.environ['TMPDIR']); run(); sys.exit(len(os.listdir()))"
    homes = {"XDG_CACHE_HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "temporary")}
    check(python(script, **homes))


@pytest.mark.parametrize("ending", ["nbc", "nbi"])
@pytest.mark.parametrize(
    "damage",
    [lambda old: old[:60], lambda old: old.replace(b"numba.core", b"numba.cose")],
    ids=["cut", "one bit"],
)
def test_damaged_files_of_the_cache_are_made_again(
    ending: str,
    damage: Callable[[bytes], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(jit, "_CACHE_DIR", tmp_path)
    signature = numba.types.void(*[numba.types.int64] * 4)

    def compiled() -> int:
        return jit._cached(lambda: numba.cfunc(signature, cache=True, error_model="numpy")(count)).cache_hits

    assert (compiled(), compiled()) == (0, 1)
    for file in tmp_path.rglob(f"*.{ending}"):
        file.write_bytes(damage(file.read_bytes()))
    assert (compiled(), compiled()) == (0, 1)
    assert "damaged" in said(caplog)[0]
