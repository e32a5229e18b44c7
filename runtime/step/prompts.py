"""Steps with prompts: the program's first part, up to the trunk's results, captured at fixed sizes.

A host launches the trunk's kernels one by one, in 25 ms for a model of 32 layers; a short prompt runs in a
quarter of that. What follows the trunk is launched op by op while the GPU still runs the trunk. So graphs of
whole steps would save nothing, and there would be one for each kind of rules, number of passes and of pairs.

Padding is tokens, rows and lines that no request owns, which ops pass over: bits stay. Sizes whose dense
layers keep a GPU busy for longer than they keep its host are left out.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from operator import le
from typing import NamedTuple

import torch

from hemiola.plugins.step.plan import COLUMNS
from hemiola.runtime.config import Resolved
from hemiola.runtime.device.graphs import Captures, Graphs
from hemiola.runtime.device.session import Computed, Trunk
from hemiola.runtime.step.parts import EngineParts, program_of
from hemiola.runtime.step.program import Batch, Forward

TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
ROWS = (1, 8)  # and the most


class Size(NamedTuple):
    """Of a step."""

    tokens: int
    rows: int
    lines: int


COUNTS = Batch("rows", "rows", "tokens", "tokens", "lines", "lines", "lines")  # by which its tensors grow


class Prompts:
    """`Program.forward` of steps that fit a size, replayed once graphs are captured."""

    def __init__(
        self, parts: EngineParts, trunk: Trunk, slowest: Callable[..., Sequence[float]] | None = None
    ) -> None:
        """slowest: of the ranks that run every step together, the most that one has of some seconds."""
        self._device, self._slowest = parts.ledger.device, slowest
        self._program = program_of(parts, lambda batch: trunk.run(batch), None)
        self.sizes = sizes_of(parts.config)
        self._largest = Size(*map(max, zip(*self.sizes, strict=True)))
        shape = self._largest.rows + 1, len(COLUMNS)
        self._plan = torch.zeros(shape, dtype=torch.int32, device=self._device)
        # What is large of what all sizes leave; each graph would keep its own.
        self._there: tuple[torch.Tensor, Computed] | None = None
        self._graphs: Graphs[Size, Forward] | None = None

    def forward(self, plan: torch.Tensor, tokens: int, lines: int) -> Forward:
        """See Program."""
        wanted, num = Size(tokens, len(plan) - 1, lines), len(plan)
        size = next((size for size in self.sizes if all(map(le, wanted, size))), None)
        if size is None:
            return self._program.forward(plan, tokens, lines)
        there = self._plan[: size.rows + 1]
        there[:num].copy_(plan)
        there[num:].copy_(plan[-1:])
        return _first(self.step(size) if self._graphs is None else self._graphs.replay(size), wanted)

    def capture(self, report: Captures) -> Graphs[Size, Forward]:
        """From now on the sizes that are left are replayed."""
        self._graphs = Graphs(self.step, self.sizes[::-1], self.sizes, self._device, report=report)
        return self._graphs

    def step(self, size: Size) -> Forward:
        """Of the plan that lies where it always lies; so do page table, lines and hidden states."""
        batch, out = self._program.forward(self._plan[: size.rows + 1], size.tokens, size.lines)
        if self._there is None:
            largest, width = self._largest, batch.page_table.shape[1]
            pages = batch.page_table.new_empty(largest.rows, width)
            self._there = pages, out.room(largest.lines, max(largest.tokens, largest.lines))
        pages, results = self._there
        page_table = pages[: size.rows].copy_(batch.page_table)
        return Forward(batch._replace(page_table=page_table), out.moved(results))

    def drop_long_ones(self) -> None:
        """Keep the sizes for which a GPU has memory, and which it computes about as fast as its host launches
        them. All tokens timed are padding: attention and recurrences are not in the time."""
        for tokens in dict.fromkeys(size.tokens for size in self.sizes):
            smallest = next(size for size in self.sizes if size.tokens == tokens)
            try:
                launching, running = self._seconds(smallest)
                if self._slowest is not None:
                    launching, running = self._slowest(launching, running)
            except torch.OutOfMemoryError:
                if self._slowest is not None:
                    raise  # the other ranks are in the middle of this step
                launching, running = 0.0, math.inf
            if running > launching / 4:
                self.sizes = [size for size in self.sizes if size.tokens < tokens]
                return

    def _seconds(self, size: Size) -> tuple[float, float]:
        """Until a step is launched, and from then on until it is done."""
        self.step(size)  # it may load kernels
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        self.step(size)
        launched = time.perf_counter()
        torch.cuda.synchronize(self._device)
        return launched - start, time.perf_counter() - launched


def sizes_of(config: Resolved) -> list[Size]:
    """The smallest first. One row of a prompt has one logit, or none before its end."""
    tokens = [num for num in TOKENS if num < config.max_step_tokens]
    if len(tokens) < len(TOKENS):
        tokens.append(config.max_step_tokens)
    rows = [num for num in ROWS if num < config.max_rows] + [config.max_rows]
    return sorted({
        Size(num_tokens, min(num, num_tokens), lines)
        for num_tokens, num in itertools.product(tokens, rows)
        for lines in ((0, 1) if num == 1 else (min(num * (1 + config.num_drafts), num_tokens),))
    })  # fmt: skip


def _first(forward: Forward, size: Size) -> Forward:
    """Of so many tokens, rows and lines."""
    batch = [part[: getattr(size, count)] for part, count in zip(forward.batch, COUNTS, strict=True)]
    return Forward(Batch(*batch), forward.out.first(size.lines, size.tokens))
