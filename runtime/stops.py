"""Stop strings in text that grows: each character is read once, however many strings there are."""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of Aho and Corasick; a state is the longest end of the text that begins a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._stop_lens = [0]  # length of the longest stop string that ends in a state
        self._depth = [0]
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._stop_lens.append(0)
                self._depth.append(self._depth[state] + 1)
            state = self._next[state][char]
        self._stop_lens[state] = len(stop)

    def _link(self) -> None:
        states = deque([0])
        while states:
            state = states.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], char) if state else 0
                self._stop_lens[child] = self._stop_lens[child] or self._stop_lens[self._fail[child]]
                states.append(child)

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def push(self, text: str) -> int | None:
        """Where the earliest stop string that ends in this text begins, counted from the text's beginning."""
        first: int | None = None
        for at, char in enumerate(text, 1):
            self._state = self._step(self._state, char)
            if length := self._stop_lens[self._state]:
                first = at - length if first is None else min(first, at - length)
        return first

    @property
    def held_len(self) -> int:
        """Length of the end of the text with which a stop string may begin."""
        state = self._state
        while state and not self._next[state]:  # one that is whole begins no other
            state = self._fail[state]
        return self._depth[state]
