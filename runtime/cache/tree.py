"""The tree of cached pages: which page holds which tokens behind which others. Knows no pools."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np


class ReuseGroup(NamedTuple):
    """Snapshots that are used again alike."""

    kind: str  # prompt, junction, interval, decode: why it was taken
    below: int  # 0: nothing is cached behind it, 1: one continuation, 2: several
    uses: int  # 0, 1, 2: more


@dataclass(eq=False, slots=True)
class Entry:
    """A cached page: the tokens up to `edge`, behind the parent's."""

    key: bytes
    parent: "Entry | None"  # None: a root, the empty prefix of one salt, which has no page
    tokens: bytes  # on which the page's content depends, besides the parent's; of a root: its salt
    page_id: int
    edge: int
    step: int  # in which it was published
    proven: bool = False  # a token was chosen behind it, and was no NaN
    sound: bool = False  # it and all before it are known to be proven
    twin: "Entry | None" = None  # its text in another tier, unless that has given it up since
    used: int = 0  # when (Evictor.clock)
    children: "set[Entry]" = field(default_factory=set)
    # of the snapshot
    slot_id: int = 0  # 0: none
    number: int = 0  # no two snapshots have the same; slots serve again and again
    kind: str = ""
    snapshot_proven: bool = False
    num_uses: int = 0
    pinned: int = -1  # step in which it is read
    above: "Entry | None" = None  # the nearest snapshot before it, or one that was, or a root
    group: ReuseGroup | None = None
    since: int = 0  # age at which it joined the group

    def subtree(self) -> "list[Entry]":
        """This page and all behind it, each behind its parent."""
        entries: list[Entry] = [self]
        for entry in entries:
            entries.extend(entry.children)
        return entries


def digest(parent: bytes, tokens: bytes) -> bytes:
    return blake2b(parent + tokens, digest_size=16).digest()


class Lacked(NamedTuple):
    """When a request was not let in for want of pages."""

    num_available: int  # then, beside those that must stay
    step: int


class Chain:
    """A request's page keys, computed as far as they are asked for. `ids` may grow behind what is known."""

    def __init__(self, ids: np.ndarray, salt: bytes, page_len: int) -> None:
        assert ids.dtype == np.int32
        self.ids = ids
        self.salt = salt
        self.root = digest(b"", salt)
        self.lacked: Lacked | None = None
        self.alone = False  # its request neither begins from what is cached nor publishes
        self._page_len = page_len
        self._keys: list[bytes] = []

    def tokens(self, index: int) -> bytes:
        start = index * self._page_len
        return self.ids[start : start + self._page_len].tobytes()

    def key(self, index: int) -> bytes:
        while len(self._keys) <= index:
            parent = self._keys[-1] if self._keys else self.root
            self._keys.append(digest(parent, self.tokens(len(self._keys))))
        return self._keys[index]


class Walk(NamedTuple):
    """How far a chain is cached."""

    path: list[Entry]
    forks: bool  # behind it, something else is cached


class Tree:
    """Entries by key. Keys only find: tokens and parents are compared, so a collision serves nobody."""

    def __init__(self, page_len: int) -> None:
        self.page_len = page_len
        self.entries: dict[bytes, Entry] = {}
        self.roots: dict[bytes, Entry] = {}

    def walk(self, chain: Chain, max_pages: int, step: int) -> Walk:
        """Follow a chain over at most so many pages, all published before this step."""
        path: list[Entry] = []
        node = self.roots.get(chain.root)
        if node is None or node.tokens != chain.salt:
            return Walk(path, False)
        for index in range(max_pages):
            entry = self.entries.get(chain.key(index))
            if entry is None:
                return Walk(path, bool(node.children))
            if entry.step == step or not self._is(entry, node, chain, index):
                break
            path.append(entry)
            node = entry
        return Walk(path, False)

    def find(self, chain: Chain, index: int) -> Entry | None:
        """The entry with a page's key; it may be another page, if hashes collide."""
        return self.entries.get(chain.key(index))

    def place(self, chain: Chain, path: list[Entry], page_id: int, step: int) -> Entry | None:
        """The entry behind a path, with this page if it is new; None if another has its hash."""
        parent = path[-1] if path else self._root(chain, step)
        if parent is None:
            return None
        index = len(path)
        entry = self.entries.get(chain.key(index))
        if entry is not None:
            return entry if self._is(entry, parent, chain, index) else None
        return self.add(parent, chain.key(index), chain.tokens(index), page_id, step)

    def add(self, parent: Entry, key: bytes, tokens: bytes, page_id: int, step: int) -> Entry:
        """A page behind a parent that has none of these tokens."""
        entry = Entry(key, parent, tokens, page_id, parent.edge + self.page_len, step)
        self.entries[entry.key] = entry
        if parent.parent is None:
            self.roots[parent.key] = parent
        parent.children.add(entry)
        return entry

    def _root(self, chain: Chain, step: int) -> Entry | None:
        root = self.roots.get(chain.root)
        if root is None:
            return Entry(chain.root, None, chain.salt, 0, 0, step)
        return root if root.tokens == chain.salt else None

    def _is(self, entry: Entry, parent: Entry, chain: Chain, index: int) -> bool:
        return entry.parent is parent and entry.tokens == chain.tokens(index)

    def remove(self, entry: Entry) -> Entry:
        """Forget a page with nothing behind it; returns its parent."""
        parent = entry.parent
        assert parent is not None and not entry.children
        del self.entries[entry.key]
        parent.children.remove(entry)
        if parent.parent is None and not parent.children:
            del self.roots[parent.key]
        return parent

    def clear(self) -> None:
        self.entries.clear()
        self.roots.clear()

    def prefixes(self) -> Iterator[tuple[list[int], Entry]]:
        """Every entry with all tokens up to its edge."""
        for entry in self.entries.values():
            pages: list[bytes] = []
            node = entry
            while node.parent is not None:
                pages.append(node.tokens[: 4 * self.page_len])
                node = node.parent
            yield np.frombuffer(b"".join(reversed(pages)), np.int32).tolist(), entry

    def audit(self) -> None:
        """Every key follows from the tokens before it, and parents and children agree."""
        for key, entry in self.entries.items():
            parent = entry.parent
            assert parent is not None and key == entry.key == digest(parent.key, entry.tokens), "a wrong key"
            home = self.roots if parent.parent is None else self.entries
            assert home.get(parent.key) is parent and entry in parent.children, "a page without its parent"
            assert entry.edge == parent.edge + self.page_len
            assert len(entry.tokens) == 4 * self.page_len
        for key, root in self.roots.items():
            assert key == root.key == digest(b"", root.tokens) and root.children, "an empty root"
        nodes = [*self.roots.values(), *self.entries.values()]
        assert sum(len(node.children) for node in nodes) == len(self.entries), "a child that is not cached"
