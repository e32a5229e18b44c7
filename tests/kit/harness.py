"""Calls an engine's segments as the runtime does, without scheduler, caches or sampling."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from kit.ops import next_edge

from hemiola.plugins.attention.pages import CODES
from hemiola.plugins.ranks import RANK
from hemiola.runtime import manifest
from hemiola.runtime.abi import INPUTS
from hemiola.runtime.device.find import find_device
from hemiola.runtime.device.kernels import load_kernels
from hemiola.runtime.device.memory import Storage
from hemiola.runtime.device.session import Computed, LoadedSegment, load_weights
from hemiola.runtime.device.transfer import upload
from hemiola.runtime.manifest_parts import GROUP


@dataclass
class Request:
    slot: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)  # all whose state is in the slot, drafts included
    committed: int = 0
    edge: int = 0


class Harness:
    """An engine on poisoned memory."""

    def __init__(self, engine_dir: Path, group: torch.Tensor | None = None) -> None:
        """group: of which ranks it is one (plugins/ranks.py); then logits are this rank's."""
        self.manifest = manifest.load(engine_dir)
        limits = self.manifest.limits
        self.table_width = -(-limits.max_len // limits.page_len)
        self.num_pages = 1 + self.table_width * limits.max_rows
        self.device = find_device(engine_dir, self.manifest.arch)
        sizes = self.num_pages, 1 + limits.max_rows
        storage = Storage(self.manifest.states, *sizes, poison=True, device=self.device)
        self.states = storage.tensors
        segments = self.manifest.segments
        names = {name for segment in segments for name in segment.weights}
        rank = 0 if group is None else int(group[RANK])
        self.weights = weights = load_weights(
            engine_dir, self.manifest, names - {GROUP}, self.device, rank=rank
        )
        if group is not None:
            weights[GROUP] = group
        if self.device.type == "cuda":
            load_kernels(engine_dir, self.manifest, self.device)
        given = engine_dir, self.manifest
        self.programs = {s.name: LoadedSegment(*given, s, weights, storage) for s in segments}
        self.requests: list[Request] = []

    def forget(self) -> None:
        """All requests, and what they left."""
        self.requests.clear()
        for tensor in self.states.values():
            tensor.fill_(0xFF if tensor.dtype is CODES else torch.nan)

    def request(self) -> Request:
        """With pages in no particular order."""
        pages = torch.randperm(self.num_pages - 1, generator=torch.Generator().manual_seed(7)) + 1
        first = len(self.requests) * self.table_width
        pages = pages[first : first + self.table_width].tolist()
        self.requests.append(Request(len(self.requests) + 1, pages))
        return self.requests[-1]

    def step(self, rows: list[tuple[Request, list[int], int]]) -> list[torch.Tensor]:
        """Rows of (request, new tokens, how many of them are drafts); logits of every new token, per row."""
        starts = [request.committed for request, _, _ in rows]
        logits, self.hidden = self.call("trunk", rows, starts)
        for request, tokens, drafts in rows:
            request.edge = next_edge(request.committed, len(tokens), drafts, self.manifest.limits.chunk_len)
            request.tokens = request.tokens[: request.committed] + tokens
            request.committed += len(tokens) - drafts
        return list(logits.split([len(tokens) for _, tokens, _ in rows]))

    def run(self, tokens: list[int], *cuts: int) -> torch.Tensor:
        """Logits of one new request fed in pieces of these sizes; the rest comes in one piece."""
        request, parts = self.request(), []
        for size in (*cuts, len(tokens) - sum(cuts)):
            parts += self.step([(request, tokens[request.committed : request.committed + size], 0)])
        return torch.cat(parts)

    def draft(self, request: Request, tokens: Sequence[int], hidden: torch.Tensor, first: int) -> Computed:
        """The head reads tokens at first, first + 1, ..., each with the hidden state before it."""
        return self.call("draft", [(request, list(tokens), 0)], [first], hidden)

    def call(
        self,
        name: str,
        rows: list[tuple[Request, list[int], int]],
        starts: list[int],
        hidden: torch.Tensor | None = None,
        wanted: Sequence[int] | None = None,
    ) -> Computed:
        """A segment with rows whose first tokens stand at `starts`; tokens `wanted`, or all, have logits."""
        lengths = [len(tokens) for _, tokens, _ in rows]
        edges = [request.edge if name == "trunk" else 0 for request, _, _ in rows]
        spans = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        made = {
            "token_ids": [token for _, tokens, _ in rows for token in tokens],
            "positions": [position for span in spans for position in span],
            "rows": [
                [sum(lengths[:n]), lengths[n], drafts, request.slot, starts[n], edges[n], 0, 0]
                for n, (request, _, drafts) in enumerate(rows)
            ],
            "page_table": [request.pages for request, _, _ in rows],
            "logits_ids": [*range(sum(lengths))] if wanted is None else wanted,
        }
        there = upload(self.device, *(np.array(value, np.int32) for value in made.values()))
        inputs = dict(zip(made, there, strict=True))
        return self.programs[name]((inputs | {"hidden": hidden})[key] for key in INPUTS[name])
