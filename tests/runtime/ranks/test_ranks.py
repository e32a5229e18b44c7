"""Ranks as processes: they answer like one, and what goes wrong with one of them ends all, at once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit.descriptors import high
from kit.served import until

from hemiola import LLM, Failed, Lost, Refused, SamplingParams
from hemiola.plugins.cpu import team
from hemiola.runtime.api import Piece
from hemiola.runtime.device import followers
from hemiola.runtime.device.followers import FollowerProcesses
from hemiola.runtime.device.ranks import MOVED, Digest, SharedMemory
from hemiola.runtime.device.ring import RecordReader, RecordWriter
from hemiola.runtime.step import ranked
from hemiola.runtime.step.follower import Replica, follow
from hemiola.runtime.step.record import Move, packed

FAMILY = "qwen3_5_moe_divisible"
RANK_1 = "weights.rank1.safetensors"
OPTIONS = {"num_pages": 40, "max_rows": 4}
PROMPTS = [[20, 6, 7, *range(30, 30 + n)] for n in (0, 33, 70)]


@pytest.fixture(scope="session")
def pair(tiny_engine: Callable[..., Path]) -> Path:
    """An engine of two ranks."""
    return tiny_engine(FAMILY, tp=2)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, and nothing that holds shared memory, which has no name."""
    monkeypatch.setattr(ranked, "CHECKED_EVERY", 1)
    before = len(shared_files())  # an event loop of another test has a bell, too
    yield
    assert not children()
    assert len(shared_files()) <= before


def test_a_follower_runs_code_from_the_folder_that_a_server_is_started_in(tmp_path: Path) -> None:
    """A stranger's engine or checkpoint may have a json.py."""
    for name in ("json", "numpy", "torch", "hemiola"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'made')!r}, 'w')")
    ended = subprocess.run(followers.COMMAND, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True)
    assert ended.returncode and not (tmp_path / "made").exists()


def shared_files() -> list[str]:
    """Descriptors of memory and bells that ranks share."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(path))
    return [name for name in found if "hemiola-ranks" in name or "eventfd" in name]


def children() -> list[int]:
    """Followers of this process that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = (path / "stat").read_text().rpartition(")")[2].split()
            if int(status[1]) == os.getpid() and "follower" in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Followers that go wrong."""

    def use(fault: str) -> None:
        tests = str(Path(__file__).parents[2])
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setattr(followers, "COMMAND", [sys.executable, "-m", "kit.bad_follower", fault])

    return use


def test_an_engine_of_two_ranks_answers_like_one(pair: Path, tiny_engine: Callable[..., Path]) -> None:
    """Greedy, drawn and with logprobs; a prefix hit; one that was cancelled; closed, and opened again."""
    rules = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=20, temperature=0.8, seed=3, logprobs=2),
    ]
    answers = []
    for engine_dir in (tiny_engine(FAMILY), pair):
        with LLM(engine_dir, **OPTIONS) as llm:
            answers.append([[out.token_ids for out in llm.generate(PROMPTS, rule)] for rule in rules])
            next(iter(llm.stream(PROMPTS[1])))  # and no more
            again = llm.generate(PROMPTS[2], rules[0])[0]
            assert again.metrics.cached_tokens > 0 and again.token_ids == answers[-1][0][2]
    assert answers[0] == answers[1]


FAULTS = {
    "dies": "rank 1 was ended by SIGKILL",
    "stops": "rank 1 has not moved for 1 seconds",
    "hangs": "no rank has moved in step 5 for 2 seconds",
    "raises": "rank 1 has ended with status 1 (ValueError: a page that is none)",
    "raises behind a step": "rank 1 has ended with status 1 (RuntimeError: CUDA error: an illegal memory",
    "differs": "rank 1 differs from the leader behind step 5: its ledger",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_goes_wrong_ends_all_requests_with_the_reason(
    pair: Path, bad: Callable[[str], None], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step; and the engine takes no more."""
    bad(fault)
    if fault == "stops":
        monkeypatch.setattr(followers, "SILENT", 1.0)
    if fault == "hangs":
        monkeypatch.setattr(followers, "STUCK", 2.0)
    llm = LLM(pair, **OPTIONS)
    pieces: SimpleQueue[Piece] = SimpleQueue()
    for prompt in PROMPTS[:2]:
        llm.submit(prompt, SamplingParams(max_tokens=400, ignore_eos=True), pieces.put)
    ends: list[Piece] = []
    while len(ends) < 2:
        piece = pieces.get(timeout=300)
        ends += [piece] * (piece.finish_reason is not None)
    assert [piece.finish_reason for piece in ends] == ["error", "error"]
    assert all(FAULTS[fault] in str(piece.error) for piece in ends), ends
    with pytest.raises(Lost) as lost:
        llm.submit(PROMPTS[0], SamplingParams(), pieces.put)
    assert isinstance(lost.value, Failed) and FAULTS[fault] in str(lost.value)
    assert FAULTS[fault] in llm.load().failure
    assert not children()
    llm.close()


def test_a_rank_that_dies_while_nothing_runs_is_noticed(pair: Path) -> None:
    with LLM(pair, **OPTIONS) as llm:
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=2))
        (follower,) = children()
        os.kill(follower, signal.SIGKILL)
        until(lambda: "was ended by SIGKILL" in llm.load().failure)


REFUSED = {
    "other build": (Refused, "rank 1 runs hemiola 0.0 with torch 1.0, the leader hemiola"),
    "no memory": (Refused, "room for 0 pages"),
    "ends at once": (Lost, "rank 1 has ended with status 3 while the engine was opened"),
    "raises opening": (Lost, r"rank 1 failed while the engine was opened \(RuntimeError: CUDA error"),
    "stops opening": (Lost, "rank 1 has not moved for 2 seconds of opening"),
    "hangs opening": (Lost, "the ranks have not opened in 4 seconds"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_ranks_that_do_not_fit_together_are_refused(
    pair: Path, bad: Callable[[str], None], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are those that the poorest rank has memory for; and nobody waits for one that hangs."""
    bad(fault)
    if fault == "ends at once":
        monkeypatch.setattr(followers, "COMMAND", [sys.executable, "-c", "raise SystemExit(3)"])
    if fault == "stops opening":
        monkeypatch.setattr(followers, "OPENING_SILENT", 2.0)
    if fault == "hangs opening":
        monkeypatch.setattr(followers, "OPENING", 4.0)
    kind, reason = REFUSED[fault]
    with pytest.raises(kind, match=reason):
        LLM(pair)


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file of a rank": (lambda path: (path / RANK_1).unlink(), f"{RANK_1} is missing"),
    "another rank's file": (
        lambda path: shutil.copy(path / "weights.rank0.safetensors", path / RANK_1),
        f"{RANK_1} was changed after the build",
    ),
    "more ranks than files": (lambda path: say_tp(path, 4), "rank_files has 2 files, tp is 4"),
    "one rank of two": (lambda path: say_tp(path, 1), "rank_files has 2 files, tp is 1"),
}


def say_tp(path: Path, tp: int) -> None:
    found = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(found | {"tp": tp}))


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_is_not_whole_is_refused_before_a_rank_starts(
    pair: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "COMMAND", ["/no/follower"])
    engine_dir, (harm, reason) = shutil.copytree(pair, tmp_path / "engine"), FOLDERS[case]
    harm(engine_dir)
    with pytest.raises(Refused, match=reason) as refused:
        LLM(engine_dir)
    assert "\n" not in str(refused.value)


def test_more_ranks_than_cores_are_named(
    pair: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They compute the same; slowly."""
    monkeypatch.setattr(followers, "COMMAND", ["true"])  # it is said before a rank has read anything
    for num_cores in (1, 2):
        monkeypatch.setattr(team, "quota", lambda num=num_cores: num)
        with pytest.raises(Lost, match="rank 1 has ended"):
            LLM(pair)
    assert [record.message for record in caplog.records if "ranks" in record.message] == [
        "2 ranks share 1 core and wait for each other in every layer"
    ]


def test_a_follower_that_nobody_leads_says_so() -> None:
    ended = subprocess.run(followers.COMMAND, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1 and "is started by" in ended.stderr


def test_a_follower_whose_leader_refused_the_engine_prints_a_traceback() -> None:
    code = """
import os
from hemiola.runtime.step.follower import _say
heard, said = os.pipe()
os.close(heard)
_say(os.fdopen(said, "w"), free=1)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_shared_memory_of_another_leader_is_refused() -> None:
    own = SharedMemory.make(2)
    with pytest.raises(Refused, match="another leader's"):
        SharedMemory(own.fd, 2, own.token + 1)
    with pytest.raises(Refused, match="not that of 4 ranks"):
        SharedMemory(own.fd, 4, own.token)
    own.close()


def test_followers_end_with_their_leader(pair: Path) -> None:
    """However that ends."""
    code = f"""
import os
from hemiola import LLM
llm = LLM({str(pair)!r}, num_pages=40, max_rows=4)
print(llm._loop.steps._followers._followers[0].process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False, text=True)
    follower = Path(f"/proc/{int(ended.stdout)}/stat")
    until(lambda: not follower.exists() or follower.read_text().rpartition(")")[2].split()[0] == "Z")


def test_ranks_keep_prefixes_on_the_host_and_in_a_file(
    pair: Path, tmp_path: Path, bad: Callable[[str], None]
) -> None:
    """Behind a restart, too: every answer is that of an engine that keeps nothing. The file waits for
    followers, which are late here."""
    bad("moves late")
    prompts = [[20 + n, 6, 7, *range(30, 250), 30 + n] for n in range(3)]
    params = SamplingParams(max_tokens=8)
    small, tiers = {"num_pages": 12, "max_rows": 1, "max_len": 320}, {"num_snapshots": 1}
    tiers |= {"host_cache_bytes": 2**24, "disk_cache_dir": str(tmp_path), "disk_cache_bytes": 2**24}
    with LLM(pair, **small, prefix_cache=False) as llm:
        wanted = [out.token_ids for out in llm.generate(prompts, params)]
    for cached in (False, True):
        with LLM(pair, **small, **tiers) as llm:
            found = [llm.generate(prompt, params)[0] for prompt in (*prompts, *prompts)]
        assert [out.token_ids for out in found] == [*wanted, *wanted]
        hits = [out.metrics.cached_tokens > 0 for out in found]
        assert hits == [cached] * 3 + [True] * 3


def test_a_prefix_that_all_ranks_have_is_packed_and_unpacked(pair: Path) -> None:
    """What each has of its pages and of its snapshot: a request that begins there has the same answer."""
    rule, prompt = SamplingParams(max_tokens=12), PROMPTS[2]
    with LLM(pair, host_cache_bytes=2**22, **OPTIONS) as llm:
        wanted = llm.generate(prompt, rule)[0].token_ids
        packed = llm.export_prefix(prompt)
        llm.reset_prefix_cache()
        edge = llm.import_prefix(packed)
        again = llm.generate(prompt, rule)[0]
        assert again.metrics.cached_tokens == edge > 0 and again.token_ids == wanted
        assert llm.export_prefix(prompt[:edge]) == packed


def test_engines_with_the_same_bits_take_each_others_prefixes(
    pair: Path, tiny_engine: Callable[..., Path]
) -> None:
    """From one rank to two and back; an engine without --same-bits takes and gives none."""
    rule, prompt = SamplingParams(max_tokens=12, logprobs=2), PROMPTS[2]
    given = OPTIONS | {"host_cache_bytes": 2**22}
    dirs = tiny_engine(FAMILY, same_bits=True), tiny_engine(FAMILY, tp=2, same_bits=True), pair
    with LLM(dirs[0], **given) as one, LLM(dirs[1], **given) as two, LLM(dirs[2], **given) as other:
        for giver, taker, asked in ((one, two, prompt), (two, one, prompt[::-1])):
            wanted = giver.generate(asked, rule)[0]
            packed = giver.export_prefix(asked)
            edge = taker.import_prefix(packed)
            found = taker.generate(asked, rule)[0]
            assert found.metrics.cached_tokens == edge > 0
            assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs)
            assert taker.export_prefix(asked[:edge]) == packed
        with pytest.raises(Refused, match="packed has ranks 'any', this engine 2"):
            other.import_prefix(packed)
        other.generate(prompt, rule)
        for taker in (one, two):
            with pytest.raises(Refused, match="packed has ranks 2, this engine 'any'"):
                taker.import_prefix(other.export_prefix(prompt))


def test_a_rank_that_dies_while_a_file_is_written_leaves_nothing(
    pair: Path, tmp_path: Path, bad: Callable[[str], None]
) -> None:
    """Who waits for its copies is told."""
    bad("dies moving")
    tiers = {"host_cache_bytes": 2**24, "disk_cache_dir": str(tmp_path), "disk_cache_bytes": 2**24}
    llm = LLM(pair, num_pages=12, max_rows=1, max_len=320, num_snapshots=1, **tiers)
    prompts = [[20 + n, 6, 7, *range(30, 250), 30 + n] for n in range(3)]
    with pytest.raises(Failed, match="rank 1 was ended by SIGKILL"):
        for prompt in prompts:
            llm.generate(prompt, SamplingParams(max_tokens=8))
    assert not children()
    llm.close()


def test_prompts_are_scored(pair: Path, tiny_engine: Callable[..., Path]) -> None:
    params, told = SamplingParams(max_tokens=3, prompt_logprobs=2), []
    for engine_dir in (tiny_engine(FAMILY, same_bits=True), tiny_engine(FAMILY, tp=2, same_bits=True)):
        with LLM(engine_dir, **OPTIONS) as llm:
            told.append([out.prompt_logprobs for out in llm.generate(PROMPTS, params)])
    assert told[0] == told[1]


class Interrupted:
    """A rank's words; somebody comes in between, behind each store or before each read."""

    def __init__(self, words: np.ndarray, come: Callable[[], None]) -> None:
        self._words, self._come = words, come

    def __setitem__(self, at: int, value: int) -> None:
        self._words[at] = value
        self._come()

    def __getitem__(self, at: int) -> int:
        self._come()
        return self._words[at]


def test_a_digest_that_is_being_posted_is_no_other_step_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader took the number of an old one and the value of the new one, and ended a healthy engine."""
    memory, of = SharedMemory.make(2), SharedMemory.of
    own = of(memory, 1)

    def look() -> None:
        monkeypatch.setattr(SharedMemory, "of", lambda *_: own)
        assert all(found.value == 7 * found.number for found in memory.digests(1))
        monkeypatch.setattr(SharedMemory, "of", lambda *_: Interrupted(own, look))

    for number in range(1, 40):
        monkeypatch.setattr(SharedMemory, "of", lambda *_: Interrupted(own, look))
        memory.post(1, Digest(number, 7 * number))

    def post() -> None:
        nonlocal number
        number += 1
        monkeypatch.setattr(SharedMemory, "of", lambda *_: own)
        memory.post(1, Digest(number, 7 * number))

    for _ in range(40):
        monkeypatch.setattr(SharedMemory, "of", lambda *_: Interrupted(own, post))
        assert all(found.value == 7 * found.number for found in memory.digests(1))
    own = np.empty(0, np.int64)  # it keeps the memory
    memory.close()


def test_a_follower_of_a_process_with_a_thousand_open_files_ends_with_its_first_record() -> None:
    """It inherits its bell by the leader's number for it, which select() does not take from 1024 on."""
    memory, bell = SharedMemory.make(2), os.eventfd(0)
    followers_own = high(bell)
    writer, reader = RecordWriter(memory, [bell], lambda: None), RecordReader(memory, 1, followers_own)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(reader.read)
        writer.write(b"a record")
        assert found.result() == b"a record"
    for descriptor in (bell, followers_own):
        os.close(descriptor)
    del writer, reader
    memory.close()


GPU_FOLLOWER = """
import json, os, sys
job, say = json.loads(input()), lambda **message: print(json.dumps(message), flush=True)
say(free=1, identity="e", build="b")
config = json.loads(input())
say(window=(b"of rank %d" % job["rank"]).hex())
windows = [bytes.fromhex(window).decode() for window in json.loads(input())["windows"]]
if sys.argv[1] == "ends":
    sys.exit(4)
say(ready=True)
print(json.dumps({"failed": f"{windows} {os.environ['CUDA_VISIBLE_DEVICES']}"}), flush=True)
"""


def opening(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str) -> FollowerProcesses:
    """Two followers with GPUs of their own have what the leader tells them of windows."""
    monkeypatch.setattr(followers, "COMMAND", [sys.executable, "-c", GPU_FOLLOWER, how])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = FollowerProcesses(tmp_path, 4, "e", "b", on_gpus=True)
    assert found.opened() == 1
    found.configure({"host_cache_bytes": 0}, 1)
    assert found.exchange(b"the leader's") == [b"the leader's", b"of rank 1", b"of rank 2", b"of rank 3"]
    return found


def test_ranks_with_gpus_get_each_other_s_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A follower sees its own GPU first."""
    found, lost = opening(monkeypatch, tmp_path, "stays"), SimpleQueue[str]()
    found.ready(lambda error: lost.put(str(error)))
    said = lost.get(timeout=60)
    windows = "[\"the leader's\", 'of rank 1', 'of rank 2', 'of rank 3']"
    assert any(f"{windows} {seen}" in said for seen in ("5,6,7,4", "6,7,4,5", "7,4,5,6")), said
    found.close()


def test_nobody_waits_for_a_rank_that_ended_while_gpus_ran_their_first_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The leader's host waits for a kernel, and hears of it when that has ended."""
    found = opening(monkeypatch, tmp_path, "ends")
    until(lambda: found.memory.is_stopped)
    with pytest.raises(Lost, match="rank 1 has ended with status 4 while the engine was opened"):
        found.ready(lambda error: None)
    found.close()


def test_a_copy_that_a_gpu_has_begun_is_not_done() -> None:
    """The leader writes a unit to the file, or reads into it, behind what followers have done with it."""
    own, done = np.zeros(8, np.int64), threading.Event()
    memory: Any = SimpleNamespace(of=lambda rank: own)
    parts: Any = SimpleNamespace(device=torch.device("cpu"), save_slot=lambda *given: None)
    parts.settled = lambda: done.wait
    records = iter([packed(Move("save_slot", (1, [0])))])
    reader: Any = SimpleNamespace(read=lambda: next(records))
    with pytest.raises(StopIteration):
        follow(Replica(parts, parts, parts, parts), memory, 1, reader, lambda error: None)
    assert own[MOVED] == 0
    done.set()
    until(lambda: own[MOVED] == 1)
