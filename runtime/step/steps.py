"""Runs plans, each by the executor that takes it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from hemiola.plugins.step import forms
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.config import Resolved
from hemiola.runtime.device.head import Head
from hemiola.runtime.device.memory import Storage
from hemiola.runtime.device.session import Drafter, Trunk
from hemiola.runtime.manifest_parts import HIDDEN
from hemiola.runtime.progress import Report, silent
from hemiola.runtime.schedule.plan import Launched, Plan
from hemiola.runtime.step.bucket import Bucket
from hemiola.runtime.step.captured import Captured
from hemiola.runtime.step.eager import EagerSteps
from hemiola.runtime.step.ledger import Ledger
from hemiola.runtime.step.pack import Ready, pack
from hemiola.runtime.step.parts import EngineParts
from hemiola.runtime.step.prompts import Prompts
from hemiola.runtime.step.table import PageTable, TableSource

if TYPE_CHECKING:
    from hemiola.runtime.step.recorded import Record, Recorded  # numba is not needed elsewhere


Execution = Bucket | Literal[True] | None  # a bucket's graph; one call for all of it; op by op


class AllSteps:
    """Steps of fixed sizes or plain rows as one call; all others op by op."""

    def __init__(
        self,
        ops: SimpleNamespace,
        ledger: Ledger,
        table: PageTable,
        whole: "Captured | Recorded | None",
        eager: EagerSteps,
        has_head: bool,
    ) -> None:
        self.ops, self.ledger, self.table = ops, ledger, table
        self.whole, self.eager = whole, eager
        self._has_head = has_head

    def open(self, slot_id: int, ids: np.ndarray, start: int, rule: Rule) -> None:
        """A request takes a slot, and begins at `start`."""
        self.ledger.open(slot_id, ids, start)
        if self.whole is not None:
            self.whole.open(slot_id, rule)

    def launch(self, plan: Plan) -> Launched:
        """Start a step; its output can be read when a fence behind it has been passed."""
        return self.launch_as(plan, self.ready(plan), self.fit(plan))

    def ready(self, plan: Plan) -> Ready:
        """All that executors take of it, but for rules and prompts that are scored."""
        return pack(plan.rows, self._has_head)

    def fit(self, plan: Plan) -> Execution:
        """How the plan is run."""
        return (self.whole.fit(plan) or None) if self.whole is not None else None

    def launch_as(self, plan: Plan, ready: Ready, fitted: Execution) -> Launched:
        """See launch."""
        if fitted is None:
            return self.eager.launch(plan, ready)
        if isinstance(fitted, Bucket):
            assert isinstance(self.whole, Captured)
            return self.whole.launch(plan, ready, fitted)
        assert self.whole is not None
        return self.whole.launch(plan, ready.packed)  # type: ignore[call-arg]

    def repeat(self, ready: Ready, fitted: Execution, plan: Callable[[], Plan]) -> None:
        """The same on a rank that reads no output. plan: makes one, of rows that have no requests."""
        if isinstance(fitted, Bucket):
            assert isinstance(self.whole, Captured)
            self.whole.repeat(ready, fitted)
        else:
            self.launch_as(Plan() if fitted else plan(), ready, fitted)


class Engine(Trunk, Drafter, Protocol):
    """A Session, or in tests something that checks what a session is given."""

    @property
    def recordings(self) -> "Sequence[Record]":
        """Trunk and head as parts of a CPU's step. Or none."""
        ...

    @property
    def ranks(self) -> Head | None:
        """What makes all logits, or the best of all, of this rank's. None: there is one rank."""
        ...

    @property
    def slowest(self) -> Callable[..., Sequence[float]] | None:
        """Of some seconds, the most that a rank has of each. None: there is one rank."""
        ...


def make_steps(
    config: Resolved,
    storage: Storage,
    session: Engine,
    pages: TableSource,
    device: torch.device,
    held: ExitStack,
    report: Report = silent,
) -> AllSteps:
    """An engine's executors. held: gets what must be closed behind them."""
    ring = storage.tensors[HIDDEN] if config.drafts == "mtp" else torch.empty(0)
    on_cpu, has_head = device.type == "cpu", config.drafts == "mtp"
    ops, ledger = forms("compiled" if on_cpu else "cuda"), Ledger(config, device)
    table = PageTable(pages, device, is_copy=config.cuda_graphs or not on_cpu)
    parts = EngineParts(ops, config, ledger, table, ring)
    if config.cuda_graphs:
        prompts = Prompts(parts, session, session.slowest)
        captured = Captured(parts, session, session)
        if device.type == "cuda":
            capture(captured, prompts, held, report)
        eager = EagerSteps(parts, session, session, prompts)
        return AllSteps(ops, ledger, table, captured, eager, has_head)
    whole = None
    if session.recordings:
        from hemiola.runtime.step.recorded import Recorded  # numba is not needed elsewhere

        whole = Recorded(parts, session.recordings, storage.poison, session.ranks)
    return AllSteps(ops, ledger, table, whole, EagerSteps(parts, session, session), has_head)


def capture(captured: Captured, prompts: Prompts, held: ExitStack, report: Report) -> None:
    """Graphs of all sizes, in one pool: a step begins when the results of the one before have been read."""
    report("measuring steps of prompts", 0, 0)
    prompts.drop_long_ones()
    trunks = prompts.capture(partial(report, "capturing graphs of prompts"))
    held.callback(trunks.close)
    steps = captured.capture(trunks.pool, partial(report, "capturing graphs of decode steps"))
    held.callback(steps.close)
