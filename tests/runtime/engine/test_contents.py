"""The audit of contents sees what it should: it is broken here in every way that a cache could be."""

from collections.abc import Callable

import pytest
import torch
from kit.engine_hand import EngineHand, Wanted

PAGE, CHUNK = 16, 8
SMALL = {"page_len": PAGE, "chunk_len": CHUNK, "num_drafts": 19}
FAMILIES = ["nemotron_h_moe", "three_convs"]


@pytest.fixture
def filled(engine_hands: Callable[..., EngineHand], wanted: Wanted) -> Callable:
    """A hand whose cache holds three pages or more, and snapshots, of one text."""

    def make(family: str) -> EngineHand:
        hand = engine_hands(family, "mtp", SMALL, num_drafts=3)
        for length in (PAGE + 1, 3 * PAGE + 2):
            hand.submit(wanted.story(family)[:length], max_tokens=3)
            hand.run()
        hand.check_contents()
        return hand

    return make


def entries(hand: EngineHand) -> list:
    return [
        entry for _, entry in sorted(hand.loop.scheduler.prefix.contents(), key=lambda found: found[1].edge)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_pages_are_seen(filled: Callable, family: str) -> None:
    hand = filled(family)
    a, b, *_ = entries(hand)
    for name, held in hand.storage.tensors.items():
        if not name.endswith("_pages"):
            continue
        kept = held.clone()
        held[[a.page_id, b.page_id]] = held[[b.page_id, a.page_id]]
        with pytest.raises(AssertionError, match=name):
            hand.check_contents()
        held.copy_(kept)
    hand.check_contents()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_snapshot_one_token_late_is_seen(filled: Callable, family: str, wanted: Wanted) -> None:
    """Each of its tensors, one by one, of as many tokens that begin and end one later."""
    hand = filled(family)
    entry = next(entry for entry in entries(hand) if entry.slot_id)
    text = wanted.story(family)
    late = hand.plain.after([*text[1 : entry.edge + 1]]).slot
    seen = 0
    for name, tensor in late.items():
        held = hand.storage.tensors[name][entry.slot_id]
        kept = held.clone()
        held.copy_(tensor)
        if name.endswith("_records"):  # a snapshot has none that mean anything
            hand.check_contents()
        else:
            with pytest.raises(AssertionError, match=name):
                hand.check_contents()
            seen += 1
        held.copy_(kept)
    assert seen >= 3
    hand.check_contents()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_write_to_what_nobody_owns_is_seen(filled: Callable, family: str) -> None:
    hand = filled(family)
    prefix = hand.loop.scheduler.prefix
    free = {"_pages": prefix.pages._free, ".state": prefix.slots._free}
    for ending, ids in free.items():
        name = next(name for name in hand.storage.tensors if name.endswith(ending))
        hand.storage.tensors[name][ids[0]].view(-1)[3] = 0.0
        with pytest.raises(AssertionError, match="nobody owns"):
            hand.check_contents()
        hand.storage.tensors[name][ids[0]] = torch.nan
    hand.check_contents()
