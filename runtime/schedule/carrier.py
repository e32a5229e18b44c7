"""Prefixes that come from another engine, or go to one: packed and unpacked in the caller's thread.

The loop's thread only finds what is stored, copies it to the host's memory, and makes known what came. Sums
and all other copies are made in the thread that asks, while steps go on.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import numpy as np

from hemiola.runtime.cache import moves
from hemiola.runtime.cache.packed import PackedForm, read, written
from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.errors import Refused

T = TypeVar("T")


class Visit(Protocol):
    """Lets a function run between two steps, and returns or raises what it does."""

    def __call__(self, act: Callable[[PrefixCache], T]) -> T: ...


class Carrier:
    """Of the engine that `visit` leads to, whose prefixes have this form."""

    def __init__(self, visit: Visit, form: PackedForm) -> None:
        self._visit, self._form, self._layout = visit, form, form.layout

    def pack(self, ids: np.ndarray, cache_salt: str) -> bytearray:
        """What is stored at the last edge of a text, ids [T] int32. Raises Refused where nothing is."""
        was_read = threading.Event()

        def fetch(prefix: PrefixCache) -> bool:
            return prefix.fetch(prefix.chain(ids, cache_salt), len(ids) + 1, was_read.set)

        lent: moves.Lent | None = None

        def lend(prefix: PrefixCache) -> None:
            nonlocal lent  # so that it is known however the visit ends
            lent = moves.lend(prefix, prefix.chain(ids, cache_salt), len(ids))

        if self._visit(fetch):
            was_read.wait()
        try:
            self._visit(lend)
            if lent is None:
                message = f"nothing is stored of the {len(ids)} tokens of prompt"
                raise Refused(
                    "not_found", "prompt", message=message, way_out="let a request compute it first"
                )
            lent.wait()
            made = written(self._form, lent.edge, lent.kind, cache_salt)
            slot = self._slot()
            for view, part in self._paired(lent.state, slot):
                part[:] = view
            self._layout.pack(ids[: lent.edge], self._numbers(lent.pages), slot, made.payload)
        finally:
            if (one := lent) is not None:
                self._visit(lambda prefix: moves.take_back(prefix, one))
        return made.seal()

    def unpack(self, packed: bytes | bytearray | memoryview) -> int:
        """Let requests start from a packed prefix; returns its tokens. Raises Refused and changes nothing."""
        content = read(self._form, packed)

        given: moves.Reserved | None = None

        def reserve(prefix: PrefixCache) -> None:
            nonlocal given
            given = moves.reserve(
                prefix, prefix.chain(content.ids, content.cache_salt), content.edge, content.kind
            )

        end = moves.give_up
        try:
            self._visit(reserve)
            if given is None:
                return content.edge
            given.wait()
            slot = self._slot() if given.state else None
            pages = dict(zip(given.pages, self._numbers(given.pages.values()), strict=True))
            self._layout.unpack(content.payload, pages, slot)
            if slot is not None:
                for view, part in self._paired(given.state, slot):
                    view[:] = part
            end = moves.adopt
        finally:
            if (one := given) is not None:
                self._visit(lambda prefix: end(prefix, one))
        return content.edge

    def _slot(self) -> np.ndarray:
        return np.zeros((self._layout.num_ranks, self._layout.slot_bytes), np.uint8)

    def _numbers(self, units: Iterable[memoryview | bytes]) -> list[np.ndarray]:
        """[ranks, bytes of a page] each."""
        return [np.frombuffer(unit, np.uint8).reshape(self._layout.num_ranks, -1) for unit in units]

    def _paired(
        self, units: Iterable[memoryview | bytes], slots: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Slots cut to units, of which the last has room behind it: the bytes of both."""
        pairs, at = [], 0
        for unit in self._numbers(units):
            part = slots[:, at : at + unit.shape[1]]
            pairs.append((unit[:, : part.shape[1]], part))
            at += unit.shape[1]
        return pairs
