"""Units of the host's memory that are lent to who packs a prefix, or who writes one that was packed.

All of this is called in the scheduler's thread, between two steps. The units are read and written elsewhere,
behind `wait`; meanwhile their content stays, and nobody finds what is not whole.
"""

from collections.abc import Callable
from typing import NamedTuple

from hemiola.runtime.cache.disk import Content as HostContent
from hemiola.runtime.cache.prefix import PrefixCache, no_room
from hemiola.runtime.cache.tier import Tier, path_to
from hemiola.runtime.cache.tree import Chain, Entry
from hemiola.runtime.errors import Refused

Content = memoryview | bytes


class Lent(NamedTuple):
    """A prefix that the host has."""

    edge: int
    kind: str  # why its snapshot was taken; "": the engine needs none
    pages: list[Content]
    state: list[Content]  # the snapshot, cut to units
    units: list[int]
    wait: Callable[[], None]  # for copies to the units


class Reserved(NamedTuple):
    """Units for what the host lacks of a prefix."""

    path: list[Entry]  # all of it, of no tree
    known: Entry | None  # the last that the host has; it is held
    page_units: dict[int, int]  # by place in the prefix
    state_units: list[int]
    pages: dict[int, Content]  # to be written
    state: list[Content]
    num_flushes: int
    wait: Callable[[], None]  # for copies from the units that began before


def lend(prefix: PrefixCache, chain: Chain, num_tokens: int) -> Lent | None:
    """What is stored at the last edge of a text. `take_back` is called when it has been read."""
    host, content = _host(prefix)
    entry = prefix.keep_deepest(chain, num_tokens)
    if entry is None:
        return None
    pages, state = [one.page_id for one in path_to(entry)], host.state_of(entry)
    units = [*pages, *state]
    host.lend(units)
    contents = [content.get(unit) for unit in units]
    return Lent(
        entry.edge, entry.kind, contents[: len(pages)], contents[len(pages) :], units, content.settled()
    )


def take_back(prefix: PrefixCache, lent: Lent) -> None:
    host, _ = _host(prefix)
    host.take_back(lent.units)


def reserve(prefix: PrefixCache, chain: Chain, edge: int, kind: str) -> Reserved | None:
    """Room for a prefix; None: the host has it already. Raises Refused where there is none. `adopt` or
    `give_up` is called when it has been written, or not."""
    host, content = _host(prefix)
    path = _path(chain, edge // prefix.page_len, kind)
    last, behind = host.known(path[-1])
    missing = range(len(path) - len(behind), len(path))
    has_state = not prefix.hybrid or (not behind and last is not None and last.slot_id > 0)
    if not missing and has_state:
        return None
    if last is not None:
        host.hold(last)
    units = host.reserve(len(missing) + (0 if has_state else host.mover.units_per_slot))
    if units is None:
        if last is not None:
            host.let_go(last)
        raise no_room(edge)
    pages, state = dict(zip(missing, units, strict=False)), units[len(missing) :]
    views = {n: content.get(unit) for n, unit in pages.items()}, [content.get(unit) for unit in state]
    return Reserved(path, last, pages, state, *views, host.num_flushes, content.settled())


def adopt(prefix: PrefixCache, given: Reserved) -> None:
    """From now on requests find it. Raises Refused where all was forgotten meanwhile."""
    host, _ = _host(prefix)
    if given.num_flushes != host.num_flushes:
        give_up(prefix, given)
        raise Refused("closed", message="the prefix cache was reset meanwhile", way_out="import it again")
    pages = {given.path[n].key: unit for n, unit in given.page_units.items()}
    host.adopt(given.path[-1], pages, given.state_units)
    if given.known is not None:
        host.let_go(given.known)


def give_up(prefix: PrefixCache, given: Reserved) -> None:
    host, _ = _host(prefix)
    host.take_back([*given.page_units.values(), *given.state_units])
    if given.known is not None:
        host.let_go(given.known)


def _host(prefix: PrefixCache) -> tuple[Tier, HostContent]:
    assert prefix.host is not None and prefix.content is not None
    return prefix.host, prefix.content


def _path(chain: Chain, num_pages: int, kind: str) -> list[Entry]:
    """The pages of a text, as entries of no tree."""
    node, path = Entry(chain.root, None, chain.salt, 0, 0, 0), []
    for index in range(num_pages):
        tokens = chain.tokens(index)
        node = Entry(chain.key(index), node, tokens, 0, node.edge + len(tokens) // 4, 0)
        path.append(node)
    path[-1].kind = kind
    return path
