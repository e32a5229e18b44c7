"""How many drafts a row may have."""

from collections.abc import Sequence

from hemiola.runtime.request import Request


class Pace:
    """As many as there is room for."""

    def choose(self, requests: Sequence[Request], most: list[int]) -> list[int]:
        """Drafts to propose for each of the rows of a step that will decode; at most most[n]."""
        return most

    def judged(self, request: Request, num_judged: int, num_accepted: int) -> None:
        """The outcome of a window."""
