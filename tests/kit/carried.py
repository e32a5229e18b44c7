"""Prefixes that leave an engine and come to it while a storm rages (runtime/cache/moves.py)."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from kit.hand import Hand

from hemiola.runtime.cache import moves
from hemiola.runtime.errors import Refused

MOST_TURNS = 6  # that a reader or writer takes


class _Read(NamedTuple):
    until: int  # turn
    lent: moves.Lent
    content: list[bytes]


class _Written(NamedTuple):
    until: int
    reserved: moves.Reserved
    text: list[int]


class Carried:
    """Units that are lent to readers and writers, some of whom give up."""

    def __init__(self, hand: Hand, dice: random.Random, is_broken: Callable[[Sequence[int]], bool]) -> None:
        self._hand, self._dice, self._is_broken = hand, dice, is_broken
        self._read: list[_Read] = []
        self._written: list[_Written] = []
        self.num_read = self.num_written = 0

    @property
    def rests(self) -> bool:
        return not (self._read or self._written)

    def begin(self, text: Sequence[int], turn: int) -> None:
        """Somebody comes for a text, or brings one."""
        prefix, until = self._hand.loop.scheduler.prefix, turn + self._dice.randrange(MOST_TURNS)
        num_pages = len(text) // prefix.page_len
        if prefix.host is None or not num_pages or not prefix.enabled:
            return
        chain = prefix.chain(np.array(text, np.int32), self._dice.choice(["", "other"]))
        try:
            if self._dice.random() < 0.5:
                lent = moves.lend(prefix, chain, len(text))
                if lent is not None:
                    self._read.append(_Read(until, lent, self._content(lent)))
            elif not any(self._is_broken(text[:n]) for n in range(1, len(text) + 1)):
                edge = self._dice.randint(1, num_pages) * prefix.page_len
                given = moves.reserve(prefix, chain, edge, "prompt" if prefix.hybrid else "")
                if given is not None:
                    self._written.append(_Written(until, given, list(text)))
        except Refused as refused:
            assert refused.code == "exhausted", refused

    def end(self, turn: int) -> None:
        """Those whose time has come."""
        for read in [read for read in self._read if read.until <= turn]:
            self._read.remove(read)
            assert self._content(read.lent) == read.content, "what is read was changed"
            moves.take_back(self._hand.loop.scheduler.prefix, read.lent)
            self.num_read += 1
        for written in [written for written in self._written if written.until <= turn]:
            self._written.remove(written)
            self._adopt(written.reserved, written.text)

    def _content(self, lent: moves.Lent) -> list[bytes]:
        content = self._hand.loop.scheduler.prefix.content
        return [bytes(content.get(unit)) for unit in lent.units]

    def _adopt(self, given: moves.Reserved, text: list[int]) -> None:
        prefix = self._hand.loop.scheduler.prefix
        page_len, units = prefix.page_len, prefix.content.content
        if self._dice.random() < 0.3:
            moves.give_up(prefix, given)
            return
        for place, unit in given.page_units.items():
            units[unit] = text[place * page_len : (place + 1) * page_len]
        for unit in given.state_units:
            units[unit] = text[: given.path[-1].edge]
        try:
            moves.adopt(prefix, given)
            self.num_written += 1
        except Refused as refused:
            assert refused.code == "closed", refused  # all was forgotten meanwhile
