"""The threads of a step: asleep between steps, never waited for when they come late, remade after a fork."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hemiola.plugins.cpu import team as teams
from hemiola.plugins.cpu.kernel import Kernel
from hemiola.plugins.cpu.simd import get_long, put_long
from hemiola.plugins.cpu.team import Crew, quota
from tests.plugins.test_jit import check, python

START = """
import signal, threading, time
from hemiola.plugins.cpu import kernel
cores = os.sched_getaffinity(0)
kernel.WORTH_A_THREAD = -1
expected = run()
same = lambda: torch.equal(run(), expected)
"""


@Kernel
def _busy(item, scratch, rounds, out):
    """Some work whose result is the item."""
    sum_ = 0
    for i in range(rounds):
        sum_ += get_long(out, item) + i % 2
    put_long(out, item, item if sum_ >= 0 else -1)


@pytest.fixture
def two_threads(many_cores: None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hemiola-helper")]


def work(num_items: int = 64, rounds: int = 2000) -> bool:
    out = torch.zeros(num_items, dtype=torch.int64)
    _busy(num_items, 1e9, rounds, out)
    return out.tolist() == list(range(num_items))


@pytest.mark.usefixtures("two_threads")
def test_helpers_are_made_once_and_sleep_between_steps() -> None:
    assert work()
    made = helpers()
    assert made and work() and helpers() == made
    time.sleep(0.05)  # they have looked around long enough
    spent = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - spent < 0.1
    assert all(work() for _ in range(200))


@pytest.mark.usefixtures("two_threads")
def test_who_got_no_thread_leaves_other_engines_without_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The team stayed locked: all others worked alone for ever, and the exit failed, too."""
    team = teams.Team(2)
    monkeypatch.setattr(teams, "_TEAM", team)
    before = helpers()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
        patch.setattr(threading.Thread, "start", fail)
        work()
    with Crew(2, 64) as crew:
        assert crew.team is team and crew.num_threads == 2
    assert len(helpers()) == len(before) + 1 and work()
    team.end()


@pytest.mark.usefixtures("two_threads")
def test_a_thread_that_comes_while_the_team_is_busy_works_alone() -> None:
    """As a second engine of the process does."""
    failed: list[int] = []

    def many(number: int) -> None:
        for _ in range(300):
            if not work(16, 500):
                failed.append(number)

    both = [threading.Thread(target=many, args=(number,)) for number in range(3)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert not failed
    with Crew(2, 0) as first, Crew(2, 0) as second:
        assert first.team is not second.team and (first.num_threads, second.num_threads) == (2, 1)


@pytest.mark.usefixtures("two_threads")
def test_a_helper_that_a_busy_machine_keeps_away_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it never comes: its life ended before the step."""
    monkeypatch.setattr(teams, "_TEAM", None)
    assert work()
    alone = teams._TEAM
    assert alone is not None
    alone.end()
    assert not any(thread.is_alive() for thread in alone._helpers)
    alone._helpers = [threading.Thread()]  # whom nobody starts
    assert work()
    alone._helpers = []


def succeeds(script: str) -> None:
    check(python(START + script))


def test_a_forked_child_makes_its_own_team() -> None:
    """It has no thread of its parent's, and here locks that other threads held."""
    succeeds("""
from hemiola.plugins.cpu import team
from hemiola.plugins.cpu.team import Crew, usual_threads
team.quota = lambda: 2  # cores that this machine may not have
from hemiola.plugins.gate.compiled import gate  # which is first called in the child
held = threading.Event()
def hold():
    with jit._LOCK, Crew(2, 0):
        held.set()
        time.sleep(600)
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(60)
    good = same() and torch.equal(gate(x, x[:, :1] * 0, "sigmoid"), x / 2)
    with Crew(2, 0) as mine:
        good = good and mine.num_threads == 2 and len(mine.team._helpers) == 1
    good = good and usual_threads() == 2 and torch.get_num_threads() == 1
    os._exit(0 if good else 1)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""")


def test_a_forked_child_does_not_wait_at_its_end_for_a_step_of_its_parent() -> None:
    """One that steps at the fork holds its team's lock, which nobody releases in the child."""
    succeeds("""
from hemiola.plugins.cpu.team import Crew
begun, ended = threading.Event(), threading.Event()
def step():
    with Crew(2, 0):
        begun.set()
        ended.wait()
threading.Thread(target=step).start()
begun.wait()
child = os.fork()
if not child:
    signal.alarm(60)
    assert same()
    sys.exit()
ended.set()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""")


def test_a_process_ends_while_its_helpers_are_awake() -> None:
    succeeds("""
signal.alarm(60)
assert all(same() for _ in range(50))
""")


def test_no_more_threads_than_cores_that_the_process_may_run_on() -> None:
    """A child that is given a core of its own asks again."""
    succeeds("""
def crew(core):
    os.sched_setaffinity(0, {core})
    with teams.Crew(2, 0) as mine:
        return mine.num_threads
from hemiola.plugins.cpu import team as teams
assert same() and (teams.quota() < 2 or teams._TEAM.most > 1)
child = os.fork()
if not child:
    os._exit(0 if crew(min(cores)) == 1 and same() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
teams._forked()
assert crew(max(cores)) == 1 and same() and not teams._TEAM._helpers
""")


TWO, ONE = "0::/a/b\n", "4:memory:/x\n3:cpu,cpuacct:/a/b\n1:cpuset:/y\n"


def v1(folder: str, quota_us: int) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": str(quota_us), f"{folder}/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("own", "files", "threads"),
    [
        (TWO, {"cpu.max": "max 100000"}, teams.MOST_THREADS),
        (TWO, {"cpu.max": "150000 100000"}, 2),
        (TWO, {"cpu.max": "10000 100000"}, 1),
        (TWO, {"a/b/cpu.max": "300000 100000", "a/cpu.max": "max 100000"}, 3),
        (TWO, {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, 4),
        (TWO, {"a/c/cpu.max": "100000 100000"}, teams.MOST_THREADS),
        ("0::/../b\n", {"cpu.max": "200000 100000"}, 2),
        (ONE, v1("cpu", 400000), 4),
        (ONE, v1("cpu", -1), teams.MOST_THREADS),
        (ONE, v1("cpu/a/b", 250000) | v1("cpu/a", -1), 3),
        (ONE, v1("cpu/a/b", -1) | v1("cpu/a", 500000), 5),
        (ONE, v1("cpu/x", 100000), teams.MOST_THREADS),
        ("", {}, teams.MOST_THREADS),
    ],
)
def test_no_more_threads_than_the_control_groups_give_time_for(
    own: str, files: dict[str, str], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(1000))
    for name, content in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(content + "\n")
    (tmp_path / "own").write_text(own)
    assert quota(tmp_path / "groups", tmp_path / "own") == threads
    assert quota(tmp_path / "groups", tmp_path / "none") >= threads
