"""Calls an engine's segments as the runtime does, without scheduler, caches or sampling."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

import hemiola.plugins  # noqa: F401  (registers the ops that programs call)
from hemiola.plugins.spec import next_edge
from hemiola.runtime import manifest


@dataclass
class Request:
    slot: int
    pages: list[int]
    tokens: list[int] = field(default_factory=list)  # all whose state is in the slot, drafts included
    committed: int = 0
    edge: int = 0


class Harness:
    """An engine on poisoned memory."""

    def __init__(self, engine_dir: Path) -> None:
        self.manifest = manifest.load(engine_dir)
        self.weights = {
            name: tensor.float()
            for name, tensor in load_file(engine_dir / self.manifest.weights_file).items()
        }
        self.programs = {s.name: _program(engine_dir / s.file) for s in self.manifest.segments}
        limits = self.manifest.limits
        self.table_width = -(-limits.max_len // limits.page_len)
        self.num_pages = 1 + self.table_width * limits.max_rows
        counts = {"page": self.num_pages, "slot": 1 + limits.max_rows}
        self.states = {
            s.name: torch.full((counts[s.kind], *s.shape), torch.nan) for s in self.manifest.states
        }
        self.num_requests = 0

    def request(self) -> Request:
        """With pages in no particular order."""
        self.num_requests += 1
        pages = torch.randperm(self.num_pages - 1, generator=torch.Generator().manual_seed(7)) + 1
        first = (self.num_requests - 1) * self.table_width
        return Request(self.num_requests, pages[first : first + self.table_width].tolist())

    def step(self, rows: list[tuple[Request, list[int], int]]) -> list[torch.Tensor]:
        """Rows of (request, new tokens, how many of them are drafts); logits of every new token, per row."""
        limits = self.manifest.limits
        exact = self.manifest.numerics == "exact"
        num_tokens = sum(len(tokens) for _, tokens, _ in rows)
        padding = -num_tokens % 32 if exact else 0
        batch = self._batch(rows, padding)
        logits, hidden = self.call("trunk", batch)
        assert hidden.shape == (num_tokens + padding, self.manifest.hidden_size)
        for request, tokens, drafts in rows:
            request.edge = next_edge(request.committed, len(tokens), drafts, limits.chunk_len)
            request.tokens = request.tokens[: request.committed] + tokens
            request.committed += len(tokens) - drafts
        self.hidden = hidden[:num_tokens]
        return list(logits.split([len(tokens) for _, tokens, _ in rows]))

    def run(self, tokens: list[int], *cuts: int) -> torch.Tensor:
        """Logits of one new request fed in pieces of these sizes; the rest comes in one piece."""
        request, parts = self.request(), []
        for size in (*cuts, len(tokens) - sum(cuts)):
            parts += self.step([(request, tokens[request.committed : request.committed + size], 0)])
        return torch.cat(parts)

    def call(self, name: str, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        segment = self.manifest.segment(name)
        flat = [self.weights[n] for n in segment.weights] + [self.states[n] for n in segment.states]
        with torch.no_grad():
            return self.programs[name](*flat, *(batch[n] for n in segment.inputs))

    def draft_batch(
        self, request: Request, tokens: list[int], hidden: torch.Tensor, first: int
    ) -> dict[str, torch.Tensor]:
        """One row of the draft segment: `tokens` stand at positions first + 1, first + 2, ..."""
        batch = {
            "token_ids": tokens,
            "positions": [*range(first + 1, first + 1 + len(tokens))],
            "cu_tokens": [0, len(tokens)],
        }
        batch |= {"page_table": [request.pages], "logits_ids": [*range(len(tokens))]}
        return {name: _int32(value) for name, value in batch.items()} | {"hidden": hidden}

    def _batch(self, rows: list[tuple[Request, list[int], int]], padding: int) -> dict[str, torch.Tensor]:
        lengths = [len(tokens) for _, tokens, _ in rows]
        spans = [range(request.committed, request.committed + len(tokens)) for request, tokens, _ in rows]
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        dump = [0] if padding else []
        return {
            name: _int32(value)
            for name, value in {
                "token_ids": [t for _, tokens, _ in rows for t in tokens] + [0] * padding,
                "positions": [p for span in spans for p in span] + [0] * padding,
                "cu_tokens": [0, *ends, *([ends[-1] + padding] if padding else [])],
                "slot_id": [request.slot for request, _, _ in rows] + dump,
                "committed": [request.committed for request, _, _ in rows] + dump,
                "edge": [request.edge for request, _, _ in rows] + dump,
                "num_drafts": [drafts for _, _, drafts in rows] + dump,
                "snapshot_slot": [0 for _ in rows] + dump,
                "snapshot_edge": [0 for _ in rows] + dump,
                "page_table": [request.pages for request, _, _ in rows]
                + [[0] * self.table_width] * len(dump),
                "logits_ids": [*range(ends[-1])],
            }.items()
        }


@cache
def _program(path: Path) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.export.load(path).graph_module


def _int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
