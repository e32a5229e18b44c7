"""Who proposes drafts. They stand in the ledger behind a request's text, whoever wrote them there."""

from typing import Protocol

import torch

from hemiola.runtime.engine.bucket import Bucket, Fed
from hemiola.runtime.engine.rules import Group
from hemiola.runtime.engine.step import Batch, Plan


class Proposer(Protocol):
    """Called after each step was judged, on the device. What it proposes may cost time, never a token."""

    def propose(self, plan: Plan, batch: Batch, hidden: torch.Tensor) -> None:
        """Set the ledger's drafts of every row with room, at most `room` ids; hidden [T, F] is the trunk's.

        A row with room 0 gets none, but the proposer may want to see its tokens (a prompt under way).
        """
        ...

    def propose_fed(
        self, bucket: Bucket, fed: Fed, batch: Batch, hidden: torch.Tensor, rules: list[Group]
    ) -> None:
        """The same of a step in a bucket, of which the host knows nothing else. rules: of its rows."""
        ...


class NoDrafts:
    """Proposes nothing."""

    def propose(self, plan: Plan, batch: Batch, hidden: torch.Tensor) -> None:
        pass

    def propose_fed(
        self, bucket: Bucket, fed: Fed, batch: Batch, hidden: torch.Tensor, rules: list[Group]
    ) -> None:
        pass
