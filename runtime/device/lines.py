"""Pages or slots as lines: of each the bytes of all its states, one tensor behind the other.

Copies move words of 8 bytes where they can: torch's kernels take as long for an element of one byte. What
copies a single line does it in one call for all its states.
"""

from collections.abc import Sequence

import torch

WORD = 8  # bytes


class StateLines:
    """states: [num_pages or num_slots, *shape] each; those of no bytes are left out."""

    def __init__(self, states: Sequence[torch.Tensor]) -> None:
        views = [state.view(len(state), -1).view(torch.uint8) for state in states if state.numel()]
        self.width = sum(state.shape[1] for state in views)  # bytes of a line
        self._bytes: list[tuple[slice, torch.Tensor]] = []  # where each stands in a line
        self._words: list[tuple[slice, torch.Tensor]] = []
        start = 0
        for state in views:
            span = slice(start, start + state.shape[1])
            start = span.stop
            if self.width % WORD == span.start % WORD == span.stop % WORD == 0:
                words = slice(span.start // WORD, span.stop // WORD)
                self._words.append((words, state.view(torch.int64)))
            else:
                self._bytes.append((span, state))

    def gather(self, where: torch.Tensor) -> torch.Tensor:
        """[len(where), width]."""
        content = torch.empty(len(where), self.width, dtype=torch.uint8, device=where.device)
        for numbers, states in self._kinds(content):
            for span, state in states:
                torch.index_select(state, 0, where, out=numbers[:, span])
        return content

    def scatter(self, content: torch.Tensor, where: torch.Tensor) -> None:
        """The other way; content: [len(where), width]."""
        for numbers, states in self._kinds(content):
            for span, state in states:
                state.index_copy_(0, where, numbers[:, span])

    def copy_from(self, line: int, content: torch.Tensor) -> None:
        """To the first bytes of content, uint8."""
        for numbers, states in self._kinds(content[: self.width]):
            _copy([numbers[span] for span, _ in states], [state[line] for _, state in states])

    def copy_to(self, line: int, content: torch.Tensor) -> None:
        """From the first bytes of content, uint8."""
        for numbers, states in self._kinds(content[: self.width]):
            _copy([state[line] for _, state in states], [numbers[span] for span, _ in states])

    def copy(self, source: int, target: int) -> None:
        """A line to another."""
        for states in (self._words, self._bytes):
            _copy([state[target] for _, state in states], [state[source] for _, state in states])

    def _kinds(self, content: torch.Tensor) -> list[tuple[torch.Tensor, list[tuple[slice, torch.Tensor]]]]:
        """Lines of bytes as each kind of states has them."""
        by_bytes = [(content, self._bytes)] if self._bytes else []
        return [(content.view(torch.int64), self._words), *by_bytes] if self._words else by_bytes


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
