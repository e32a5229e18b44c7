"""Slots stand at chunk edges."""

import pytest

from hemiola.runtime.cache.slots import SlotPool


def test_slots_stand_at_the_last_edge_that_tokens_passed() -> None:
    slots = SlotPool(4, chunk_len=16)
    ids = [slots.acquire() for _ in range(3)]
    assert sorted(ids) == [1, 2, 3] and slots.num_free == 0
    for slot_id, final_len, edge in zip(ids, (15, 16, 47), (0, 16, 32), strict=True):
        assert slots.commit(slot_id, final_len) == slots.edge[slot_id] == edge
    slots.audit(set(ids))
    slots.release(ids[1])
    slots.audit({ids[0], ids[2]})
    assert slots.acquire() == ids[1] and slots.edge[ids[1]] == 0


def test_the_audit_of_slots_finds() -> None:
    slots = SlotPool(4, chunk_len=16)
    slot_id = slots.acquire()
    for held in (set(), {slot_id, 3}):
        with pytest.raises(AssertionError):
            slots.audit(held)
    slots.edge[slot_id] = 5
    with pytest.raises(AssertionError, match="grid"):
        slots.audit({slot_id})
