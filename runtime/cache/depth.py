"""How deep requests can really start: which pages lie before a snapshot that is kept, in whatever tier.

A page without a snapshot behind it saves nothing in an engine with recurrences. So a router must count pages
up to the deepest snapshot, and no others. A page counts as long as it has a snapshot of its own in a tier, or
a page behind it that counts.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from hemiola.runtime.cache.tree import Entry

log = logging.getLogger("hemiola")


class Observer(Protocol):
    """Is called in the scheduler's thread, and must not take long. One that raises is called no more."""

    def stored(self, path: Sequence[Entry]) -> None:
        """Requests can start behind these pages now; each is the next one's parent."""
        ...

    def removed(self, path: Sequence[Entry]) -> None:
        """They no longer can; each is the one before's parent."""
        ...


class SafeObserver:
    """An observer that costs nobody else anything: once it has raised, it is not called again."""

    def __init__(self, observer: Observer) -> None:
        self._observer: Observer | None = observer

    def stored(self, path: Sequence[Entry]) -> None:
        self._tell("stored", path)

    def removed(self, path: Sequence[Entry]) -> None:
        self._tell("removed", path)

    def _tell(self, method: str, path: Sequence[Entry]) -> None:
        if self._observer is None:
            return
        try:
            getattr(self._observer, method)(path)
        except BaseException:  # sys.exit(), too; or it has no such method
            log.exception("an observer raised; it is not called again")
            self._observer = None


class Depth:
    """Where requests can start, of all tiers together."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._counts: Counter[bytes] = Counter()  # by key: its snapshots, and pages behind it that count

    def attach(self, entry: Entry) -> None:
        """A tier can start requests at this edge; each tier says so once."""
        added: list[Entry] = []
        node = entry
        while node.parent is not None:
            self._counts[node.key] += 1
            if self._counts[node.key] > 1:
                break
            added.append(node)
            node = node.parent
        if added:
            self._observer.stored(added[::-1])

    def detach(self, entry: Entry) -> None:
        """That tier can no more; the entry is still in its tree."""
        gone: list[Entry] = []
        node = entry
        while node.parent is not None:
            self._counts[node.key] -= 1
            if self._counts[node.key]:
                break
            del self._counts[node.key]
            gone.append(node)
            node = node.parent
        if gone:
            self._observer.removed(gone)
