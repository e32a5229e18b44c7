"""Steps with prompts, padded to fixed sizes for which a GPU has graphs of the trunk.

A host launches the trunk's kernels one by one, in 25 ms for a model of 32 layers; a short prompt runs in a
quarter of that. Padding is tokens, rows and logits of nobody, which ops pass over: bits stay. Sizes whose
dense layers keep a GPU busy for longer than they keep its host are left out.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from operator import le
from typing import NamedTuple

import torch

from hemiola.runtime.abi import INPUTS, widths
from hemiola.runtime.config import Resolved
from hemiola.runtime.device.graphs import Captures, Graphs
from hemiola.runtime.device.session import Computed, Trunk

TOKENS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
ROWS = (1, 8)  # and the most


class Size(NamedTuple):
    """Of a step: T, N and L of the trunk's inputs."""

    tokens: int
    rows: int
    lines: int


class Inputs(NamedTuple):
    """Of the trunk; those of a step, or what they are copied to."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    page_table: torch.Tensor
    logits_ids: torch.Tensor


class Prompts:
    """A trunk for steps of any size, which are replayed once graphs of them are captured."""

    def __init__(
        self,
        config: Resolved,
        session: Trunk,
        device: torch.device,
        slowest: Callable[..., Sequence[float]] | None = None,
    ) -> None:
        """slowest: of the ranks that run every step together, the most that one has of some seconds."""
        self.session, self.device, self._slowest = session, device, slowest
        self.sizes = sizes_of(config)
        self._most = most = Size(*map(max, zip(*self.sizes, strict=True)))
        self._graphs: Graphs[Size, Computed] | None = None
        self._results: Computed | None = None  # what all sizes leave, or each graph would keep its own
        sizes = {"T": most.tokens, "N": most.rows, "L": most.lines, "W": widths(config, "trunk")["W"], "8": 8}
        shapes = [[sizes[letter] for letter in INPUTS["trunk"][name]] for name in Inputs._fields]
        self._there = Inputs(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))

    def run(self, batch: object) -> Computed:
        """Logits and hidden states of a step."""
        given = Inputs(*(getattr(batch, name) for name in Inputs._fields))
        wanted = Size(len(given.token_ids), len(given.rows), len(given.logits_ids))
        size = next((size for size in self.sizes if all(map(le, wanted, size))), None)
        if size is None:
            return self.session.run(batch)
        for there, part in zip(self._views(size), given, strict=True):
            there[: len(part)].copy_(part)
            there[len(part) :].zero_()
        return self.replay(size).first(wanted.lines, wanted.tokens)

    def run_all(self, batch: object) -> Computed:
        """The same, with the hidden states of all tokens; no graphs, since few prompts ask for it."""
        return self.session.run_all(batch)

    def replay(self, size: Size, /) -> Computed:
        return self.step(size) if self._graphs is None else self._graphs.replay(size)

    def capture(self, report: Captures) -> Graphs[Size, Computed]:
        """From now on the sizes that are left are replayed."""
        self._graphs = Graphs(self.step, self.sizes[::-1], self.sizes, self.device, report=report)
        return self._graphs

    def step(self, size: Size) -> Computed:
        """The step whose inputs lie where they always lie; so do its results."""
        out = self.session.run(self._views(size))
        if self._results is None:
            self._results = out.room(self._most.lines, max(self._most.tokens, self._most.lines))
        return out.moved(self._results)

    def drop_long_ones(self) -> None:
        """Keep the sizes that a GPU has memory for, and has done soon after its host has launched them.

        Nobody's tokens are all that it is given: attention and recurrences are not in the time.
        """
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
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        self.step(size)
        launched = time.perf_counter()
        torch.cuda.synchronize(self.device)
        return launched - start, time.perf_counter() - launched

    def _views(self, size: Size) -> Inputs:
        sizes = (size.tokens, size.tokens, size.rows, size.rows, size.lines)
        return Inputs(*(there[:num] for there, num in zip(self._there, sizes, strict=True)))


def sizes_of(config: Resolved) -> list[Size]:
    """The smallest first. One row of a prompt has one logit, or none before its end."""
    tokens = [num for num in TOKENS if num < config.max_step_tokens]
    if len(tokens) < len(TOKENS):
        tokens.append(config.max_step_tokens)
    rows = [num for num in ROWS if num < config.max_rows] + [config.max_rows]
    return sorted({
        Size(most, min(num, most), lines)
        for most, num in itertools.product(tokens, rows)
        for lines in ((0, 1) if num == 1 else (min(num * (1 + config.num_drafts), most),))
    })  # fmt: skip
