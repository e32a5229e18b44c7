"""Plain runs: one request alone, in one step, on fresh memory, and what its pages and its slot hold then.

From them follow all contents that a cache may have, and every logit, bit for bit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from kit.harness import Harness, Request
from kit.narrow import by_token
from kit.rank_threads import RankHarness

from hemiola.runtime import manifest
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.choose.sampling import choose, takes_more_than_best, widened
from hemiola.runtime.device.transfer import upload_ints
from hemiola.runtime.outline import State

Tensors = dict[str, torch.Tensor]


class Run(NamedTuple):
    logits: torch.Tensor  # [T, V]
    pages: Tensors  # by state: [T, ...], a line per token
    slot: Tensors  # by state: the slot at an edge, with records of the tokens behind it


class Plain:
    """Plain runs of one engine, each made once."""

    def __init__(self, engine_dir: Path) -> None:
        self.manifest = manifest.load(engine_dir)
        self.harness = Harness(engine_dir) if self.manifest.tp == 1 else RankHarness(engine_dir)
        self.limits = self.manifest.limits
        self._head: tuple[Request, tuple[int, ...], torch.Tensor] | None = None  # who has pairs of which text
        self._runs: dict[tuple[int, bytes], Run] = {}
        self._longer: dict[bytes, Run] = {}  # a page edge's text: a run that holds it

    def after(self, token_ids: Sequence[int], edge: int | None = None) -> Run:
        """edge: where the slot shall stand; else at the last one that the tokens pass."""
        if edge is None:
            edge = len(token_ids) // self.limits.chunk_len * self.limits.chunk_len
        key = edge, np.array(token_ids, np.int32).tobytes()
        if key not in self._runs:
            run = self._runs[key] = self._run(list(token_ids), len(token_ids) - edge)
            for end in range(self.limits.page_len, len(token_ids) + 1, self.limits.page_len):
                self._longer.setdefault(key[1][: 4 * end], run)
        return self._runs[key]

    def keep(self, token_ids: Sequence[int]) -> None:
        """Of this text and its beginnings; all other runs are forgotten."""
        text = np.array(token_ids, np.int32).tobytes()
        self._runs = {key: run for key, run in self._runs.items() if text.startswith(key[1])}
        self._longer = {page: run for page, run in self._longer.items() if text.startswith(page)}

    def page(self, token_ids: Sequence[int]) -> Tensors:
        """The last page of a text that ends at a page's edge."""
        run = self._longer.get(np.array(token_ids, np.int32).tobytes()) or self.after(token_ids)
        span = slice(len(token_ids) - self.limits.page_len, len(token_ids))
        return {name: lines[span] for name, lines in run.pages.items()}

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V]: at position i, what token i + 1 is chosen from. Of a run that begins with these tokens."""
        text = np.array(token_ids, np.int32).tobytes()
        for (_, known), run in self._runs.items():
            if known.startswith(text):
                return run.logits[: len(token_ids)]
        return self.after(token_ids).logits

    def greedy(self, token_ids: Sequence[int], length: int) -> list[int]:
        """The text and how it goes on, a token at a time, up to this length."""
        harness, text, self._head = self.harness, list(token_ids), None
        harness.forget()
        request = harness.request()
        (logits,) = harness.step([(request, text, 0)])
        while len(text) < length:
            text.append(int(logits[-1].argmax()))
            (logits,) = harness.step([(request, text[-1:], 0)])
        return text

    def drafts(self, token_ids: Sequence[int], num: int, rule: Rule) -> list[int]:
        """What the MTP head says behind a text: of each token and the state before it, its own in the end.

        Quick if the last call was for a text that begins like this one.
        """
        known = tuple(token_ids[:-1])
        place, harness = len(known), self.harness
        if self._head is None or self._head[1][:place] != known:
            harness.forget()
            request = harness.request()
            harness.step([(request, list(known), 0)])
            self._head = request, known, harness.hidden
            if place > 1:
                harness.draft(request, known[1:], harness.hidden[:-1], first=1)
        request, text, hidden = self._head
        self._head = request, text[:place], hidden  # pairs from here on are overwritten
        ids = torch.tensor([[*token_ids, *[0] * num]], dtype=torch.int32, device=harness.device)
        hidden, slot = hidden[place - 1 : place], torch.tensor([0], device=harness.device)
        for at in range(place, place + num):
            logits, hidden = harness.draft(request, ids[0, at : at + 1].tolist(), hidden, first=at)
            if takes_more_than_best([rule]):
                logits = widened(logits, self.manifest.vocab_size)
            ids[0, at + 1] = choose(logits, [rule], slot, slot + at + 1, ids)[0]
        return ids[0, len(token_ids) :].tolist()

    def _run(self, token_ids: list[int], num_drafts: int) -> Run:
        harness, self._head = self.harness, None
        harness.forget()
        request = harness.request()
        logits = harness.step([(request, token_ids, num_drafts)])[0].clone()
        hidden = harness.hidden
        if self.manifest.drafts == "mtp" and len(token_ids) > 1:
            harness.draft(request, token_ids[1:], hidden[:-1], first=1)
        pages, slot, own = {}, {}, upload_ints(harness.device, request.pages)
        for state in self.manifest.states:
            held = harness.states[state.name]
            if state.kind == "page":
                pages[state.name] = by_token(state.name, held[own]).flatten(0, 1)[: len(token_ids)]
            elif state.name == "mtp.hidden":
                slot[state.name] = hidden.new_full(state.shape, torch.nan)
                last = torch.arange(len(token_ids), device=harness.device)[-state.shape[0] :]
                slot[state.name][last % state.shape[0]] = hidden[last]
            else:
                slot[state.name] = held[request.slot].clone()
        return Run(logits, pages, slot)


def places(state: State, edge: int, committed: int, ring_slack: int) -> list[int] | None:
    """Lines of a slot's state that mean something when it stands at `edge`, with records up to `committed`.

    None: all of it. ring_slack: chunk_len + num_drafts, from which a conv's ring is longer by width - 1.
    """
    if state.name.endswith(".state"):
        return None
    if state.name.endswith("_records"):
        first = edge
    elif state.name.endswith(".conv"):
        first = edge - (state.shape[0] - ring_slack)
    else:
        assert state.name == "mtp.hidden", f"what does {state.name} hold?"
        first = edge - 1
    return [position % state.shape[0] for position in range(max(first, 0), committed)]
