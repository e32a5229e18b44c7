"""A step as the engine reads it: numpy buffers of fixed width, filled from a plan, seen as torch tensors."""

from dataclasses import dataclass

import numpy as np
import torch

from hemiola.runtime.cache.pages import Pages
from hemiola.runtime.cache.slots import Slots
from hemiola.runtime.config import Resolved
from hemiola.runtime.sampling import Draw
from hemiola.runtime.scheduler import Plan


@dataclass(frozen=True, slots=True)
class Batch:
    """The engine ABI, in groups by who knows them. Valid until the next `Feed.fill`."""

    # plan: which rows, how many tokens of each
    cu_tokens: torch.Tensor  # [N+1] int32, as all tensors here
    num_drafts: torch.Tensor  # [N] the last of a row's tokens that are only proposed
    logits_ids: torch.Tensor  # [L] tokens whose logits are wanted
    # requests: ids and lengths
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    committed: torch.Tensor  # [N]
    # caches
    slot_id: torch.Tensor  # [N]
    edge: torch.Tensor  # [N]
    snapshot_slot: torch.Tensor  # [N] 0: none
    page_table: torch.Tensor  # [N, W]
    # not for the engine: what judge needs, None for a row that gets no token
    draws: tuple[Draw | None, ...]


def tokens_width(config: Resolved) -> int:
    """T at most, padding included."""
    return -(-config.max_step_tokens // config.pad_tokens) * config.pad_tokens


def rows_width(config: Resolved) -> int:
    """N at most: every running request, and the dump row that holds the padding."""
    return config.max_rows + 1


def logits_width(config: Resolved) -> int:
    """L at most: a row's drafts and the token after them."""
    return config.max_rows * (1 + config.num_drafts)


def table_width(config: Resolved) -> int:
    """W: pages of the longest request."""
    return -(-config.max_len // config.page_len)


class Feed:
    """Owns the buffers of a step. Each is rewritten in full, as far as the batch shows it."""

    def __init__(self, config: Resolved, pages: Pages, slots: Slots) -> None:
        self.pages = pages
        self.slots = slots
        self.pad_tokens = config.pad_tokens
        num_tokens, num_rows = tokens_width(config), rows_width(config)
        self._token_ids = np.zeros(num_tokens, np.int32)
        self._positions = np.zeros(num_tokens, np.int32)
        self._cu_tokens = np.zeros(num_rows + 1, np.int32)
        self._committed = np.zeros(num_rows, np.int32)
        self._slot_id = np.zeros(num_rows, np.int32)
        self._edge = np.zeros(num_rows, np.int32)
        self._page_table = np.zeros((num_rows, table_width(config)), np.int32)
        self._logits_ids = np.zeros(logits_width(config), np.int32)
        self._num_drafts = np.zeros(num_rows, np.int32)
        self._none = torch.zeros(num_rows, dtype=torch.int32)  # no snapshots: prefix reuse
        self._arange = np.arange(num_tokens, dtype=np.int32)

    def fill(self, plan: Plan) -> Batch:
        """The batch of a plan; in exact numerics a dump row makes the tokens a multiple of the tile."""
        num_rows, num_tokens = len(plan.rows), sum(plan.num_tokens)
        self._fill_rows(plan)
        draws, num_logits = self._fill_draws(plan)
        self._fill_tokens(plan, num_tokens)
        if padding := -num_tokens % self.pad_tokens:
            self._fill_dump_row(num_rows, num_tokens, padding)
            num_rows, num_tokens = num_rows + 1, num_tokens + padding
        return Batch(
            cu_tokens=torch.from_numpy(self._cu_tokens[: num_rows + 1]),
            num_drafts=torch.from_numpy(self._num_drafts[:num_rows]),
            logits_ids=torch.from_numpy(self._logits_ids[:num_logits]),
            token_ids=torch.from_numpy(self._token_ids[:num_tokens]),
            positions=torch.from_numpy(self._positions[:num_tokens]),
            committed=torch.from_numpy(self._committed[:num_rows]),
            slot_id=torch.from_numpy(self._slot_id[:num_rows]),
            edge=torch.from_numpy(self._edge[:num_rows]),
            snapshot_slot=self._none[:num_rows],
            page_table=torch.from_numpy(self._page_table[:num_rows]),
            draws=draws,
        )

    def _fill_rows(self, plan: Plan) -> None:
        num_rows = len(plan.rows)
        slot_id = self._slot_id[:num_rows]
        slot_id[:] = [request.slot_id for request in plan.rows]
        self._committed[:num_rows] = plan.committed
        self._num_drafts[:num_rows] = plan.num_drafts
        np.cumsum(plan.num_tokens, out=self._cu_tokens[1 : num_rows + 1])
        np.take(self.slots.edge, slot_id, out=self._edge[:num_rows], mode="clip")  # "raise" would copy
        np.take(self.pages.table, slot_id, axis=0, out=self._page_table[:num_rows], mode="clip")

    def _fill_draws(self, plan: Plan) -> tuple[tuple[Draw | None, ...], int]:
        draws: list[Draw | None] = []
        num_logits = 0
        end = 0
        for request, num_tokens, num_drafts in zip(plan.rows, plan.num_tokens, plan.num_drafts, strict=True):
            end += num_tokens
            if request.committed_len + num_tokens - num_drafts < request.total_len:
                draws.append(None)
                continue
            drafts = tuple(request.drafts[:num_drafts])
            draws.append(Draw(request.params, request.seed, request.total_len, drafts))
            wanted = 1 + num_drafts
            self._logits_ids[num_logits : num_logits + wanted] = self._arange[end - wanted : end]
            num_logits += wanted
        return tuple(draws), num_logits

    def _fill_tokens(self, plan: Plan, num_tokens: int) -> None:
        start = 0
        for request, num, num_drafts in zip(plan.rows, plan.num_tokens, plan.num_drafts, strict=True):
            known = num - num_drafts
            self._token_ids[start : start + known] = request.ids[
                request.committed_len : request.committed_len + known
            ]
            if num_drafts:
                self._token_ids[start + known : start + num] = request.drafts[:num_drafts]
            start += num
        num_rows = len(plan.rows)
        offsets = self._committed[:num_rows] - self._cu_tokens[:num_rows]
        np.add(
            np.repeat(offsets, plan.num_tokens), self._arange[:num_tokens], out=self._positions[:num_tokens]
        )

    def _fill_dump_row(self, num_rows: int, num_tokens: int, padding: int) -> None:
        """A row in slot 0 and page 0, where nothing is kept, all of whose tokens stand at position 0."""
        self._cu_tokens[num_rows + 1] = num_tokens + padding
        self._token_ids[num_tokens : num_tokens + padding] = 0
        self._positions[num_tokens : num_tokens + padding] = 0
        for buffer in (self._committed, self._num_drafts, self._slot_id, self._edge, self._page_table):
            buffer[num_rows] = 0
