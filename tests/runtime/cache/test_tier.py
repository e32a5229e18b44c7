"""A tier below the prefix cache, alone."""

from collections.abc import Callable

import numpy as np
import pytest
from kit.fake_session import FakeSession, FakeUnits, resolved

from hemiola.runtime.cache import moves, tree
from hemiola.runtime.cache.eviction import Cost
from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.cache.tier import Tier
from hemiola.runtime.cache.tree import Chain, Entry
from hemiola.runtime.errors import Refused

P = 4


def a_text(num_pages: int, first: int = 0, salt: bytes = b"") -> list[Entry]:
    """The pages of a text of another tier, each with a snapshot. first: its first token."""
    chain = Chain(np.arange(first, first + num_pages * P, dtype=np.int32), salt, P)
    path = [Entry(chain.root, None, chain.salt, 0, 0, 0)]
    for n in range(num_pages):
        path.append(Entry(chain.key(n), path[-1], chain.tokens(n), 1 + n, (1 + n) * P, 0, slot_id=1 + n))
        path[-1].kind = "prompt"
    return path[1:]


class Nowhere(FakeUnits):
    """Keeps nothing."""

    def save_pages(self, page_ids: object, units: object) -> None: ...

    def save_slot(self, slot_id: int, units: object) -> None: ...


def test_a_snapshot_that_was_read_again_is_the_first_to_go() -> None:
    """Its page had lost it, and had nothing behind it: it was known as one that saves nothing, too."""
    tier = Tier(Cost(10, 40), P, Nowhere(FakeSession(resolved()), 20))
    first, second = a_text(2)
    one, two = tier.keep(first), tier.keep(second)
    assert one is not None and two is not None
    tier._drop_state(one)
    tier._forget(two)
    tier.audit()
    units = tier.reserve(tier.mover.units_per_slot)
    assert units is not None
    tier.adopt(first, {}, units)
    assert one.slot_id > 0
    tier.audit()


def test_a_request_begins_with_the_state_of_nobody() -> None:
    """What it begins from was found, and its snapshot went to make room for what it displaced itself."""
    tier = Tier(
        Cost(10, 40, pair=1.0), P, Nowhere(FakeSession(resolved()), 8)
    )  # room for two pages with theirs
    first, second = a_text(2)
    found = tier.keep(first)
    assert found is not None and tier.keep(second) is not None and tier.num_free == 0
    with tier.held(found):
        tier.hold(found)
        tier.let_go(found)  # another's, who brings more of it
        assert tier.keep(*a_text(1, first=50)) is not None
        assert len(tier.state_of(found)) == tier.mover.units_per_slot
        tier.audit()
        tier.forget(found)
    while tier._give_up_one():
        tier.audit()
    assert tier.num_free == 8


def test_a_leaf_goes_before_a_state_above_it_that_is_worth_less() -> None:
    tier = Tier(Cost(10, 40, pair=1.0), P, Nowhere(FakeSession(resolved()), 8))
    first, second = a_text(2)
    one, two = tier.keep(first), tier.keep(second)
    assert one is not None and two is not None and tier.num_free == 0
    assert one.group is not None and one.group.below == 1
    assert tier.reserve(tier.mover.units_per_slot) is not None
    assert one.slot_id == 0 < two.slot_id
    tier.audit()


def test_a_new_page_goes_before_one_that_was_read_long_ago() -> None:
    tier = Tier(Cost(10, 0), P, Nowhere(FakeSession(resolved(), hybrid=False), 2))
    old = tier.keep(*a_text(1))
    assert old is not None
    for _ in range(2):
        tier.tick()
        with tier.held(old):
            tier.load(old, 0, [1], 1)
    tier.tick()
    new = tier.keep(*a_text(1, first=50))
    assert tier.reserve(1) is not None
    assert [entry for _, entry, _ in tier.contents()] == [new]


def test_what_has_no_room_in_the_end_costs_all_that_others_have() -> None:
    """Half of it was there, and is not given up for the other half: so all else was, for nothing."""
    tier = Tier(Cost(10, 40), P, Nowhere(FakeSession(resolved()), 14))
    path = a_text(9)
    began = tier.keep(path[4])
    assert began is not None and tier.keep(*a_text(1, first=70)) is not None and tier.num_free == 2
    assert tier.keep(path[8]) is None
    assert tier.num_entries == 6
    tier.hold(began)
    assert tier.reserve(7) is None and tier.num_entries == 6
    tier.let_go(began)
    units = tier.reserve(7)
    assert units is not None
    assert tier.reserve(8) is None and tier.num_entries > 0
    tier.audit()


def test_what_two_read_is_written_again_when_one_of_them_has_read_it() -> None:
    tier = Tier(Cost(10, 40), P, Nowhere(FakeSession(resolved()), 8))
    found = tier.keep(*a_text(1))
    assert found is not None
    units = [found.page_id, *tier.state_of(found)]
    for _ in range(2):
        tier.lend(units)
    tier.take_back(units)
    tier.forget(found)
    assert tier.reserve(5) is None and tier.num_free == 4
    tier.audit()
    tier.take_back(units)
    assert tier.num_free == 8
    tier.audit()


def test_a_state_comes_to_a_page_before_its_own() -> None:
    """The page between was given up while both were read from the file."""
    tier = Tier(Cost(10, 40), P, Nowhere(FakeSession(resolved()), 20))
    first, second, third = a_text(3)
    one, two, units = tier.keep(first), tier.keep(second), tier.reserve(1 + tier.mover.units_per_slot)
    assert one is not None and two is not None and units is not None
    tier._forget(two)
    tier._drop_state(one)
    tier.adopt(third, {third.key: units[0]}, units[1:])
    assert one.slot_id == 0 and tier.num_entries == 1 and tier.num_free == 19
    tier.audit()


def test_a_snapshot_that_was_read_is_as_old_as_if_it_were_not() -> None:
    tier = Tier(Cost(10, 40), P, Nowhere(FakeSession(resolved()), 8))
    found = tier.keep(*a_text(1))
    assert found is not None
    tier.tick()
    with tier.held(found):
        tier.load(found, 0, [1], 1)
    assert (found.num_uses, found.used) == (1, 1)


def imported(prefix: PrefixCache, chain: Chain, edge: int) -> bool:
    """Whether it was written; what it holds is not looked at."""
    given = moves.reserve(prefix, chain, edge, "prompt")
    if given is not None:
        moves.adopt(prefix, given)
    return given is not None


def test_a_text_stays_held_by_those_who_brought_more_of_it_or_found_no_room(make_hand: Callable) -> None:
    session = FakeSession(resolved(prefix_cache=True, host_cache_bytes=9))
    prefix = make_hand(session=session).loop.scheduler.prefix
    chain, other = (prefix.chain(np.arange(n, n + 40, dtype=np.int32)) for n in (0, 50))
    assert imported(prefix, chain, 16) and imported(prefix, chain, 24)
    with pytest.raises(Refused, match="no room for a prefix of 40 tokens"):
        imported(prefix, chain, 40)
    assert prefix.host is not None and prefix.host.num_entries == 3
    assert imported(prefix, other, 16)
    prefix.audit()


def test_a_state_that_is_read_is_written_over(make_hand: Callable) -> None:
    session = FakeSession(resolved(prefix_cache=True, host_cache_bytes=9))
    prefix = make_hand(session=session).loop.scheduler.prefix
    chain, other = (prefix.chain(np.arange(n, n + 40, dtype=np.int32)) for n in (0, 50))
    assert imported(prefix, chain, 24)
    lent = moves.lend(prefix, chain, 40)
    assert lent is not None and lent.edge == 24
    with pytest.raises(Refused, match="no room"):
        imported(prefix, other, 16)
    moves.take_back(prefix, lent)
    assert imported(prefix, other, 16)
    prefix.audit()


def test_tenants_whose_salts_have_one_hash_share_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = tree.digest
    monkeypatch.setattr(tree, "digest", lambda parent, tokens: digest(parent, tokens if parent else b""))
    tier = Tier(Cost(10, 40), P, Nowhere(FakeSession(resolved()), 20))
    own, others = a_text(2, salt=b"own")[-1], a_text(2, salt=b"others")[-1]
    kept = tier.keep(own)
    assert kept is not None and tier.known(own) == (kept, [])
    assert tier.known(others)[0] is None and tier.keep(others) is None
    assert tier.keep(a_text(1, first=50, salt=b"others")[0]) is None, "own's root has another's page"
    assert tier.num_entries == 2
    found = a_text(2, first=70, salt=b"others")
    found[0].page_id, found[1].page_id = 12, 13
    tier.restore(found, {found[1].key: ("prompt", [14, 15, 16])})
    assert tier.num_entries == 2
    tier.audit()
