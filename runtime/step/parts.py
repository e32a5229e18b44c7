"""What all executors of an engine share, and the program of a step bound to it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch

from hemiola.runtime.config import Resolved
from hemiola.runtime.device.session import Computed, Drafter
from hemiola.runtime.step.ledger import Ledger
from hemiola.runtime.step.program import Batch, Pairs, Program, ProgramParts, StepState
from hemiola.runtime.step.table import PageTable


class EngineParts(NamedTuple):
    ops: SimpleNamespace  # of plugins/step, in one form
    config: Resolved
    ledger: Ledger
    table: PageTable
    ring: torch.Tensor  # the drafting head's slot state; empty: no head drafts


def program_of(parts: EngineParts, trunk: Callable[[Batch], Computed], head: Drafter | None) -> Program:
    """A step of tensors, with a session's programs as its parts."""
    ops, config, ledger, table, ring = parts
    places = torch.arange(config.max_rows, dtype=torch.int32, device=ledger.device)

    def draft(pairs: Pairs) -> Computed:
        assert head is not None
        return head.draft(**pairs._asdict())

    programs = ProgramParts(trunk, draft, lambda num: places[:num])
    return Program(ops, config, programs, StepState(table.on_device, ledger.lengths, ledger.ids, ring))
