"""Who proposes: a request carries the ids it gets from here, and nobody else asks where they came from."""

from typing import Protocol

import torch

from hemiola.runtime.request import Request
from hemiola.runtime.scheduler import Plan


class Proposer(Protocol):
    """Called after each step was committed. What it proposes may cost time, never a token."""

    def propose(self, plan: Plan, room: list[int], hidden: torch.Tensor) -> None:
        """Set `drafts` of each row's request, at most room[n] ids; hidden [T, F] is the trunk's of this step.

        A row with room 0 gets none, but the proposer may want to see its tokens (a prompt under way).
        """
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...


class NoDrafts:
    """Proposes nothing."""

    def propose(self, plan: Plan, room: list[int], hidden: torch.Tensor) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass
