"""Prompt lookup: what followed the last occurrence of the text's own suffix (after arXiv 2304.04487)."""

import torch

from hemiola.runtime.request import Request
from hemiola.runtime.scheduler import Plan


class NgramIndex:
    """Suffix lookup in one request's ids, prompt and output alike.

    Grams of min_n..max_n tokens are indexed as ids arrive, each by the place where it last ended, so that a
    proposal costs max_n - min_n + 1 look-ups however long the text is.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n, self.max_n = min_n, max_n
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    @property
    def length(self) -> int:
        return len(self._ids)

    def extend(self, ids: list[int]) -> None:
        """Append committed ids. Grams become known once a token follows them: a suffix never finds itself."""
        first = max(len(self._ids), 1)
        self._ids += ids
        for end in range(first, len(self._ids)):
            for n in range(self.min_n, min(self.max_n, end) + 1):
                self._ends[tuple(self._ids[end - n : end])] = end

    def propose(self, num_drafts: int) -> list[int]:
        """The num_drafts ids after the latest earlier occurrence of the longest known suffix, or none.

        An occurrence that overlaps the end of the text continues into the proposal, as a period would.
        """
        for n in range(min(self.max_n, len(self._ids)), self.min_n - 1, -1):
            end = self._ends.get(tuple(self._ids[-n:]))
            if end is not None:
                return self._continue(end, num_drafts)
        return []

    def _continue(self, end: int, num_drafts: int) -> list[int]:
        drafts = self._ids[end : end + num_drafts]
        period = len(drafts)
        while len(drafts) < num_drafts:
            drafts.append(drafts[len(drafts) - period])
        return drafts


class NgramProposer:
    """Prompt lookup for every running request."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n, self.max_n = min_n, max_n
        self._texts: dict[int, NgramIndex] = {}

    def propose(self, plan: Plan, room: list[int], hidden: torch.Tensor) -> None:
        for request, num_drafts in zip(plan.rows, room, strict=True):
            if num_drafts > 0:
                request.drafts = self._index(request).propose(num_drafts)

    def _index(self, request: Request) -> NgramIndex:
        index = self._texts.setdefault(request.id, NgramIndex(self.min_n, self.max_n))
        index.extend(request.ids[index.length : request.total_len].tolist())
        return index

    def forget(self, request: Request) -> None:
        self._texts.pop(request.id, None)
