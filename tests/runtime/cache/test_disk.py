"""The file below the host's memory: what it serves is right, whatever happened to it."""

import errno
import fcntl
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kit.fake_session import FakeSession, FakeUnits, oracle, resolved
from kit.hand import Hand

from hemiola.runtime.cache import disk
from hemiola.runtime.cache.disk import DiskTier
from hemiola.runtime.cache.disk_file import header_bytes, open_file
from hemiola.runtime.errors import Refused

PAGE, HEADER = 8, header_bytes(8)
UNIT = HEADER + 1024
Make = Callable[..., Hand]


@pytest.fixture
def open_hand(make_hand: Make, tmp_path: Path) -> Make:
    """A loop whose file lies in tmp_path; what is left open at the end is closed."""
    opened: list[Hand] = []

    def make(
        folder: Path = tmp_path, hybrid: bool = True, units: int = 200, host: int = 30, **changes: int
    ) -> Hand:
        tiers = {"host_cache_bytes": host, "disk_cache_dir": str(folder), "disk_cache_bytes": units * UNIT}
        sizes = {"prefix_cache": True, "num_pages": 12, "num_slots": 4, "max_rows": 2} | changes
        opened.append(make_hand(session=FakeSession(resolved(**sizes, **tiers), hybrid=hybrid)))
        return opened[-1]

    yield make
    for hand in opened:
        end(hand)


def end(hand: Hand) -> None:
    """As a server ends: all is kept."""
    prefix = hand.loop.scheduler.prefix
    if prefix.disk is not None:
        prefix.save()
        prefix.disk.close()
        prefix.audit()
        prefix.disk = None


def ask(hand: Hand, prompt: list[int], num_tokens: int = 4) -> int:
    """The answer is the oracle's; returns where it began."""
    request_id = hand.submit(prompt, max_tokens=num_tokens)
    hand.run()
    assert hand.token_ids(request_id) == oracle(prompt, num_tokens)
    return hand.requests[request_id - 1].metrics.cached_tokens


def texts(num: int, length: int = 40) -> list[list[int]]:
    return [random.Random(seed).choices(range(97), k=length) for seed in range(num)]


@pytest.mark.parametrize("hybrid", [True, False])
def test_a_server_that_was_restarted_finds_yesterdays_prefixes(open_hand: Make, hybrid: bool) -> None:
    hand, asked = open_hand(hybrid=hybrid), texts(6)
    for text in asked:
        assert ask(hand, text) == 0
        # what is being written is lent: on a busy machine there may be no room for more
        assert hand.loop.scheduler.prefix.disk.drain(60)
    end(hand)
    hand = open_hand(hybrid=hybrid)
    assert [ask(hand, text) for text in asked] == [32] * 6


def test_prefixes_that_left_the_hosts_memory_come_back_from_the_file(open_hand: Make) -> None:
    hand, asked = open_hand(host=24), texts(8)
    for text in asked:
        ask(hand, text)
        hand.loop.scheduler.prefix.disk.drain(60)
    disk_tier = hand.loop.scheduler.prefix.disk
    assert disk_tier is not None
    begun = []
    for text in asked[:4]:
        hand.loop.scheduler.prefix.disk.drain(60)
        begun.append(ask(hand, text))
    assert begun == [32] * 4 and disk_tier.tier.statistics.num_hits >= 3


def test_several_requests_wait_for_one_read(open_hand: Make) -> None:
    hand, (text,) = open_hand(), texts(1)
    ask(hand, text)
    assert hand.loop.scheduler.prefix.disk.computing.seconds(1) > 0
    end(hand)
    hand = open_hand()
    ids = [hand.submit([*text, n], max_tokens=3) for n in range(3)]
    hand.run()
    assert [hand.token_ids(n) for n in ids] == [oracle([*text, n], 3) for n in range(3)]
    tier = hand.loop.scheduler.prefix.disk
    assert tier.tier.statistics.num_hits == 1
    assert max(entry.num_uses for _, entry, _ in tier.tier.contents()) == 3
    assert tier.reading.seconds(1) > 0


def test_a_read_of_nothing_is_awaited_for_ever(open_hand: Make) -> None:
    """The host's memory has all that the file has."""
    hand, (text,) = open_hand(), texts(1)
    ask(hand, text)
    prefix = hand.loop.scheduler.prefix
    prefix.save()
    assert prefix.disk is not None and prefix.disk.drain(60)
    assert not prefix.disk.fetch(hand.requests[0].chain, len(text), 0, lambda: None)
    assert not prefix.disk.is_awaited


def test_a_request_that_is_cancelled_while_it_is_read_for_leaves_nothing(open_hand: Make) -> None:
    hand, (text,) = open_hand(), texts(1)
    ask(hand, text)
    end(hand)
    hand = open_hand()
    request_id, scored = hand.submit(text, max_tokens=3), hand.submit(text, max_tokens=3, prompt_logprobs=0)
    hand.loop._read_inbox()
    assert [r.id for r in hand.loop.scheduler.fetching] == [request_id], "what is scored is computed"
    hand.loop.abort(request_id)
    hand.loop.abort(scored)
    hand.run()
    assert hand.last(request_id).finish_reason == "cancelled"
    assert ask(hand, text) == 32


@pytest.mark.parametrize("forget", ["flush", "withdraw"])
def test_what_is_forgotten_while_it_is_read_serves_nobody(open_hand: Make, forget: str) -> None:
    hand, (text,) = open_hand(), texts(1)
    ask(hand, text)
    end(hand)
    hand = open_hand()
    request_id = hand.submit(text, max_tokens=3)
    hand.loop._read_inbox()
    prefix = hand.loop.scheduler.prefix
    if forget == "flush":
        prefix.flush()
    else:
        chain = hand.requests[0].chain
        prefix.host.withdraw(chain)
        prefix.disk.withdraw(chain)
    hand.run()
    assert hand.token_ids(request_id) == oracle(text, 3)
    assert hand.requests[0].metrics.cached_tokens == 0
    end(hand)


def test_a_text_of_which_somebody_computed_nan_stays_in_the_tiers(open_hand: Make) -> None:
    hand, (text,) = open_hand(), texts(1)
    ask(hand, text)
    prefix = hand.loop.scheduler.prefix
    prefix.save()
    assert prefix.disk.drain(60) and prefix.disk.tier.num_entries and prefix.host.num_entries
    hand.loop.storage.next_token = lambda ids: None
    failed = hand.submit(text, max_tokens=3)
    hand.run()
    assert hand.last(failed).finish_reason == "error"
    assert prefix.disk.tier.num_entries == prefix.host.num_entries == 0


def file_of(folder: Path) -> Path:
    (found,) = folder.glob("*.prefixes")
    return found


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    used = [unit for unit in range(0, len(content), UNIT) if content[unit]]
    for unit in used:
        match kind:
            case "a bit of the content":
                content[unit + HEADER + 1] ^= 1
            case "half a header":
                content[unit + 40 : unit + HEADER] = bytes(HEADER - 40)
            case "no content":
                content[unit + HEADER : unit + UNIT] = bytes(1024)
            case "garbage":
                content[unit : unit + HEADER] = os.urandom(HEADER)
            case _:
                header = json.loads(content[unit : unit + HEADER].rstrip(b"\0"))
                header |= {
                    "another form": {"form": "f" * 64},
                    "another key": {"key": "AAAA"},
                    "another parent": {"parent": "AAAA"},
                    "other tokens": {"tokens": header["tokens"][::-1]},
                    "another edge": {"edge": header["edge"] + 8},
                    "an edge of text": {"edge": "8"},
                    "a part of text": {"part": "0"},
                    "a part too many": {"part": 99},
                }[kind]
                content[unit : unit + HEADER] = json.dumps(header).encode().ljust(HEADER, b"\0")
    path.write_bytes(content)


DAMAGES = """a bit of the content, half a header, no content, garbage, another form, another key,
another parent, other tokens, another edge, an edge of text, a part of text, a part too many"""


@pytest.mark.parametrize("kind", DAMAGES.replace("\n", " ").split(", "))
def test_a_damaged_file_is_not_believed(open_hand: Make, tmp_path: Path, kind: str) -> None:
    hand, asked = open_hand(), texts(3)
    for text in asked:
        ask(hand, text)
    end(hand)
    damage(file_of(tmp_path), kind)
    hand = open_hand()
    for text in asked:
        ask(hand, text)
    for text in asked:
        ask(hand, text)


def test_a_file_of_another_size_begins_anew(open_hand: Make, tmp_path: Path) -> None:
    hand, (text,) = open_hand(), texts(1)
    ask(hand, text)
    end(hand)
    hand = open_hand(units=150)
    assert ask(hand, text) == 0 and file_of(tmp_path).stat().st_size == 150 * UNIT


FAULTS = [("pwrite", errno.ENOSPC), ("pwrite", errno.EIO), ("pwrite", errno.EROFS), ("pwrite", errno.ESTALE)]
FAULTS += [("preadv", errno.EIO), ("preadv", errno.ESTALE)]


@pytest.mark.parametrize(("call", "code"), FAULTS, ids=lambda value: errno.errorcode.get(value, value))
def test_a_disk_that_fails_costs_nothing_but_hits(
    open_hand: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, code: int
) -> None:
    hand, asked = open_hand(), texts(3)
    for text in asked:
        ask(hand, text)
    end(hand)
    hand = open_hand()

    def fails(*_: object) -> bytes:
        raise OSError(code, "no")

    monkeypatch.setattr(disk.os, call, fails)
    for text in (*asked, *texts(6)[3:], *asked):
        ask(hand, text)
    assert hand.loop.scheduler.prefix.disk.drain(60)
    hand.loop.scheduler.prefix.collect()
    monkeypatch.undo()
    assert caplog.text.count("computed again") == 1, "each error is a line"
    assert "Traceback" not in caplog.text and hand.loop.scheduler.prefix.disk.is_on


def test_an_engine_does_not_open_for_a_block_that_the_disk_cannot_read(
    open_hand: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand, asked, pread = open_hand(), texts(3), os.pread
    for text in asked:
        ask(hand, text)
    end(hand)

    def fails(file: int, size: int, place: int) -> bytes:
        if place == 0:
            raise OSError(errno.EIO, "Input/output error")
        return pread(file, size, place)

    monkeypatch.setattr(disk.os, "pread", fails)
    hand = open_hand()
    assert sorted(ask(hand, text) for text in asked) == [0, 32, 32]


def test_a_file_that_somebody_cuts_serves_what_is_left(open_hand: Make, tmp_path: Path) -> None:
    hand, asked = open_hand(), texts(3)
    for text in asked:
        ask(hand, text)
    end(hand)
    hand = open_hand()
    os.truncate(file_of(tmp_path), 2 * UNIT + HEADER + 7)
    for text in (*asked, *asked):
        ask(hand, text)


def test_a_file_with_little_room_gives_up_what_is_worth_least(open_hand: Make) -> None:
    hand, asked = open_hand(units=20), texts(6)
    for text in [*asked, *asked]:
        ask(hand, text)
        hand.loop.scheduler.prefix.disk.drain(60)
    assert hand.loop.scheduler.prefix.disk.tier.statistics.evicted_units > 0


def test_to_a_tier_no_text_grows_old_and_none_was_ever_read(open_hand: Make) -> None:
    """So what the file gave up did not depend on what requests asked for."""
    hand, asked = open_hand(), texts(2, 38)
    for text in asked:
        ask(hand, text, 1)
    end(hand)
    hand = open_hand()
    for n in range(16):
        ask(hand, [n], 1)
    assert ask(hand, asked[0], 1) == 32
    prefix = hand.loop.scheduler.prefix
    tier = prefix.disk.tier
    found = {entry.num_uses: (entry.used, ids[0]) for ids, entry, _ in tier.contents() if entry.slot_id}
    assert found == {0: (0, asked[1][0]), 1: (16, asked[0][0])} and tier._evictor.clock == 17
    assert prefix.host._evictor.clock == 17


def test_what_nobody_reads_stays_in_the_file_for_ever(open_hand: Make) -> None:
    """A long text saves more than a short one. But it grows old while others come."""
    hand, (long, *short) = open_hand(units=22, hybrid=False), [texts(1, 60)[0], *texts(60, 12)]
    ask(hand, long, 1)
    hand.loop.scheduler.prefix.save()
    for text in short:
        ask(hand, text, 1)
        hand.loop.scheduler.prefix.save()
        assert hand.loop.scheduler.prefix.disk.drain(60)
    assert hand.loop.scheduler.prefix.disk.tier.match(hand.requests[0].chain, 60, 0) is None


def test_tenants_are_apart_in_the_file(open_hand: Make) -> None:
    hand, (text,) = open_hand(), texts(1)
    request_id = hand.submit(text, max_tokens=3, cache_salt="a")
    hand.run()
    assert hand.ended(request_id)
    end(hand)
    hand = open_hand()
    assert ask(hand, text) == 0


def test_a_salt_of_the_longest_kind_keeps_nothing(open_hand: Make, caplog: pytest.LogCaptureFixture) -> None:
    """1,024 characters of four bytes each were longer than a header."""
    (text,) = texts(1)
    for cached in (0, 32):
        hand = open_hand()
        request_id = hand.submit(text, max_tokens=3, cache_salt="\U0001f600" * 1024)
        hand.run()
        assert hand.token_ids(request_id) == oracle(text, 3)
        assert hand.requests[request_id - 1].metrics.cached_tokens == cached
        end(hand)
    assert not caplog.records


def test_pages_of_many_tokens_keep_nothing(
    open_hand: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """700 tokens in base64 were longer than a header."""
    monkeypatch.setattr(FakeUnits, "unit_bytes", 1 << 14)
    sizes = {"page_len": 1024, "max_len": 2048, "max_step_tokens": 256, "units": 800}
    (text,) = texts(1, length=1030)
    for cached in (0, 1024):
        hand = open_hand(**sizes)
        assert ask(hand, text) == cached
        end(hand)
    assert not caplog.records


# Whose file it is.


def test_a_folder_that_cannot_be_used_is_refused_by_name(open_hand: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="cannot be opened") as refused:
        open_hand(tmp_path / "file")
    assert (refused.value.code, refused.value.field) == ("in_use", "disk_cache_dir")


def test_a_file_that_another_process_has_is_refused(open_hand: Make, tmp_path: Path) -> None:
    hand = open_hand()
    end(hand)
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print('has it', flush=True); input()"
    command = [sys.executable, "-c", code, str(file_of(tmp_path))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "has it\n"
        with pytest.raises(Refused, match="used by another process"):
            open_hand()
        other.communicate("\n")


def test_a_file_of_somebody_elses_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.prefixes"
    path.write_text("theirs")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(Refused, match="is not a file of yours"):
        open_file(path, 2**12)
    assert path.read_text() == "theirs"


def test_another_file_of_the_users_is_cut(tmp_path: Path) -> None:
    """Who may write to the folder gave it a second name there."""
    own, path = tmp_path / "thesis.txt", tmp_path / "x.prefixes"
    own.write_text("mine")
    os.link(own, path)
    with pytest.raises(Refused, match="is not a file of yours"):
        open_file(path, 2**12)
    assert own.read_text() == "mine"


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.prefixes"
    if kind == "folder":
        path.mkdir()
    else:
        os.mknod(path, 0o600 | (0o010000 if kind == "pipe" else 0o140000))
    with pytest.raises(Refused, match=r"x\.prefixes (is not a file of yours|cannot be opened)"):
        open_file(path, 2**12)


def test_a_disk_without_locks_is_taken_for_one_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre without its option says this."""

    def unlocked(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unlocked)
    with pytest.raises(Refused) as refused:
        open_file(tmp_path / "x.prefixes", 2**12)
    assert refused.value.field == "disk_cache_dir"
    assert str(refused.value) == (
        f"{tmp_path / 'x.prefixes'} cannot be locked (Function not implemented); name another folder"
    )


def test_a_link_in_the_place_of_the_file_is_refused(open_hand: Make, tmp_path: Path) -> None:
    hand = open_hand()
    end(hand)
    path = file_of(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="cannot be opened"):
        open_hand()


@pytest.mark.parametrize("num_free", [100, 0], ids=["that others take meanwhile", "from the beginning"])
def test_a_disk_without_room_is_refused_with_the_number_and_is_full_then(
    open_hand: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_free: int
) -> None:
    """ext4 gives what it has before it says that it has no more."""
    taken, plain = [], os.fstatvfs

    def full(file: int, start: int, length: int) -> None:
        taken.append(length)
        os.ftruncate(file, length // 2)
        raise OSError(28, "No space left on device")

    def room(file: int) -> os.statvfs_result:
        found = list(plain(file))
        found[1], found[4] = UNIT, 2 * num_free  # bytes of a block; blocks that are free
        return os.statvfs_result(found)

    monkeypatch.setattr(disk.os, "posix_fallocate", full)
    monkeypatch.setattr(disk.os, "fstatvfs", room)
    with pytest.raises(Refused, match="No space left") as refused:
        open_hand()
    assert (refused.value.code, refused.value.field) == ("exhausted", "disk_cache_bytes")
    assert file_of(tmp_path).stat().st_size == 0
    assert bool(taken) == (num_free > 0)


LEFT_OPEN = """
import json, sys, weakref
from kit.fake_session import VOCAB, FakeSession, resolved
from kit.hand import Hand
from hemiola.runtime.cache.eviction import Cost
from hemiola.runtime.open import make_loop
from hemiola.runtime.schedule.request import Bounds
changes, text = map(json.loads, sys.argv[1:])
config = resolved(**changes)
session = FakeSession(config, hybrid=True)
loop = make_loop(config, session, session, None, Cost(10, 40))
hand = Hand(loop, Bounds(config.max_len, config.max_len, VOCAB, eos_ids=()))
hand.submit(text, max_tokens=4)
hand.run()
weakref.finalize(loop, loop.scheduler.prefix.save)
"""


def test_a_program_that_ends_with_an_open_engine_keeps_nothing(open_hand: Make) -> None:
    """Python's own pools of threads take nothing more then."""
    hand, (text,) = open_hand(), texts(1)
    end(hand)
    words = [sys.executable, "-c", LEFT_OPEN, json.dumps(hand.loop.config.model_dump()), json.dumps(text)]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    ended = subprocess.run(
        words, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": paths}
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ask(open_hand(), text) == 32


def test_a_killed_process_leaves_nothing_wrong(open_hand: Make, tmp_path: Path) -> None:
    """A copy of the file, taken at any moment, serves what is right."""
    hand, asked = open_hand(), texts(6)
    for n, text in enumerate(asked):
        ask(hand, text)
        (tmp_path / f"copy{n}").mkdir()
        source = file_of(tmp_path)
        (tmp_path / f"copy{n}" / source.name).write_bytes(source.read_bytes())
    for n in range(len(asked)):
        other = open_hand(tmp_path / f"copy{n}")
        for text in asked:
            ask(other, text)


def test_the_thread_ends_with_the_engine(open_hand: Make) -> None:
    hand = open_hand()
    tier = hand.loop.scheduler.prefix.disk
    assert isinstance(tier, DiskTier)
    end(hand)
    assert not tier._worker._thread.is_alive()


def test_a_request_that_joins_a_read_that_has_just_ended_waits_for_ever(open_hand: Make) -> None:
    hand, (text,) = open_hand(), texts(1)
    ask(hand, text)
    end(hand)
    hand = open_hand()
    prefix, called = hand.loop.scheduler.prefix, []
    chain = prefix.chain(np.array(text, np.int32))
    assert prefix.fetch(chain, len(text), lambda: called.append("first"))
    while prefix.disk._done.empty():
        pass
    assert prefix.fetch(chain, len(text), lambda: called.append("second"))
    prefix.collect()
    assert called == ["first", "second"]


def test_a_read_does_not_wait_for_copies_from_the_units_that_it_writes_to(open_hand: Make) -> None:
    """On a GPU a copy to the device may be under way that began before the units were given up."""
    hand, (text,) = open_hand(), texts(1)
    ask(hand, text)
    end(hand)
    hand, order = open_hand(), []
    units = hand.loop.scheduler.prefix.host.mover
    fill = units.fill
    units.settled = lambda: lambda: order.append("settled")
    units.fill = lambda unit, read: order.append("fill") or fill(unit, read)
    assert ask(hand, text) == 32
    assert order[0] == "settled" and "fill" in order
