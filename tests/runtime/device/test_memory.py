"""The memory behind pages and slots."""

import mmap
from pathlib import Path

import pytest
import torch
from kit.refused import code_and_field

from hemiola.runtime.device import memory
from hemiola.runtime.device.memory import CPU, Storage, free_bytes, free_bytes_of_host
from hemiola.runtime.errors import Refused
from hemiola.runtime.outline import State

STATES = (
    State(name="layers.0.k", kind="page", shape=(4, 2), dtype="float32"),
    State(name="layers.1.state", kind="slot", shape=(3,), dtype="float32"),
    State(name="layers.1.count", kind="slot", shape=(1,), dtype="int32"),
    State(name="layers.2.k", kind="page", shape=(4,), dtype="float8_e4m3fn"),
)


def test_poison_marks_fresh_and_freed_places() -> None:
    storage = Storage(STATES, num_pages=3, num_slots=4, poison=True)
    k, state, count, narrow = (storage.tensors[s.name] for s in STATES)
    assert k.shape == (3, 4, 2) and state.shape == (4, 3) and count.shape == (4, 1)
    assert k.isnan().all() and state.isnan().all() and (count < 0).all() and narrow.isnan().all()
    k[:], state[:], count[:], narrow[:] = 1, 2, 3, 4
    storage.free_pages([2])
    storage.free_slots([1, 3])
    assert k[2].isnan().all() and (k[:2] == 1).all()
    assert narrow[2].isnan().all() and (narrow[:2] == 4).all()
    assert state[[1, 3]].isnan().all() and (state[[0, 2]] == 2).all() and count.tolist()[2] == [3]


def test_without_poison_nothing_is_written() -> None:
    storage = Storage(STATES, num_pages=3, num_slots=4)
    storage.tensors["layers.0.k"][:] = 1
    storage.free_pages([1])
    assert (storage.tensors["layers.0.k"] == 1).all()


def test_copy_slot_copies_every_slot_state_and_no_page() -> None:
    storage = Storage(STATES, num_pages=3, num_slots=4)
    storage.tensors["layers.1.state"][2] = torch.tensor([1.0, 2.0, 3.0])
    storage.tensors["layers.1.count"][2] = 9
    storage.tensors["layers.0.k"][2] = 5
    storage.copy_slot(2, 1)
    assert storage.tensors["layers.1.state"][1].tolist() == [1, 2, 3]
    assert storage.tensors["layers.1.count"].flatten().tolist() == [0, 9, 9, 0]
    assert not storage.tensors["layers.0.k"][1].any()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def pages_of(num_bytes: int) -> tuple[State, ...]:
    return (State(name="k", kind="page", shape=(num_bytes,), dtype="float8_e4m3fn"),)


def test_caches_take_their_memory_when_they_are_made_and_give_it_back() -> None:
    """Or the next engine would reckon with it, too, and both would end when their caches fill."""
    before, slack = resident(), 2**24
    storage = Storage(pages_of(2**21), num_pages=100, num_slots=1)
    assert abs(resident() - before - 100 * 2**21) < slack
    storage.close()
    assert resident() - before < slack


def test_what_the_host_has_not_is_refused_before_any_of_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    states = (*pages_of(2**20), State(name="s", kind="slot", shape=(2**20,), dtype="float8_e4m3fn"))
    said = (
        "there is no memory for 60 pages and 41 slots: they take 105906176 bytes, and 104857600 are free;"
        " lower num_pages, cache_bytes or max_rows, or close what else is open"
    )
    monkeypatch.setattr(memory, "free_bytes_of_host", lambda: 100 * 2**20)
    with monkeypatch.context() as patched, pytest.raises(Refused, match=f"^{said}$"):
        patched.setattr(memory, "_zeros", None)
        Storage(states, num_pages=60, num_slots=41)
    Storage(states, num_pages=60, num_slots=40)


def test_a_state_without_numbers_takes_none() -> None:
    states = (*pages_of(4), State(name="s", kind="slot", shape=(0, 3), dtype="float32"))
    storage = Storage(states, num_pages=0, num_slots=2, poison=True)
    assert [tuple(t.shape) for t in storage.tensors.values()] == [(0, 4), (2, 0, 3)]


def test_free_bytes_is_what_this_machine_has() -> None:
    assert 2**20 < free_bytes(CPU, []) < 2**50


def test_more_pages_than_memory_is_a_refusal_not_a_traceback() -> None:
    assert code_and_field(lambda: Storage(STATES, 10**12, 2)) == ("exhausted", "num_pages")


GROUPS = {
    "2": ("0::/a/b", "{}", "memory.max", "memory.current", "inactive_file"),
    "1": (
        "4:memory:/a/b",
        "memory/{}",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


@pytest.mark.parametrize("limited", ["a/b", "a", ""], ids=["own", "above", "root"])
@pytest.mark.parametrize("version", GROUPS)
def test_memory_is_what_every_control_group_above_leaves(tmp_path: Path, version: str, limited: str) -> None:
    line, place, limit, usage, cached = GROUPS[version]
    (tmp_path / "own").write_text(f"9:name=systemd:/\n{line}\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    for group in ("", "a", "a/b"):
        folder = tmp_path / "groups" / place.format(group)
        folder.mkdir(parents=True, exist_ok=True)
        most = "3000000" if group == limited else "max" if version == "2" else "9223372036854771712"
        for name, text in ((limit, most), (usage, "1000000"), ("memory.stat", f"anon 1\n{cached} 200000")):
            (folder / name).write_text(f"{text}\n")
    assert free_bytes_of_host(tmp_path / "meminfo", tmp_path / "groups", tmp_path / "own") == 2200000
