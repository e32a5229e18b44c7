"""How the tokens of a step are chosen: by an argmax, or by the rules of each line."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from hemiola.runtime.device.head import Best
from hemiola.runtime.device.session import Computed
from hemiola.runtime.engine.request import Rule
from hemiola.runtime.engine.rules import Group
from hemiola.runtime.engine.sampling import choose, logprobs, spans, takes_more_than_best, widened
from hemiola.runtime.step.program import Batch

Rules = Sequence[Rule] | Sequence[Group]


class Argmax:
    """The best token of each line. Operands may be views of a recording."""

    def __init__(self, ops: SimpleNamespace) -> None:
        self._ops = ops

    def scores(self, out: Computed) -> Any:
        best = out.best
        return out.logits if best is None else best

    def choose(self, scores: Any, batch: Batch) -> Best:
        return scores if isinstance(scores, Best) else Best(*self._ops.best(scores))

    def draft(self, out: Computed, slot: Any, number: int) -> Any:
        return self.choose(self.scores(out), None).token_id  # type: ignore[arg-type]


class ByRules:
    """Lines whose rules edit logits, draw, follow grammars or report logprobs, and others beside them.

    Tokens and drafts are chosen by the same law: a draft stays where the trunk chooses it, too.
    """

    def __init__(
        self,
        ops: SimpleNamespace,
        lengths: torch.Tensor,  # [4, S]
        ids: torch.Tensor,  # [S, W]
        vocab_size: int,
        rules: Callable[[torch.Tensor], Rules],  # of the lines of these slots [L]
        draft_rules: Callable[[torch.Tensor, int], Rules],  # of the lines that draft for these slots [D]
        masks: "Masks | None" = None,
        asked: Sequence[tuple[int, slice, int]] = (),  # rows that report logprobs, their lines, of how many
    ) -> None:
        self._argmax, self._lengths, self._ids = Argmax(ops), lengths, ids
        self._vocab_size = vocab_size
        self._rules, self._draft_rules, self._masks, self._asked = rules, draft_rules, masks, asked
        self.logprobs: dict[int, tuple[torch.Tensor, ...]] = {}  # by row, once tokens are chosen

    def scores(self, out: Computed) -> Any:
        return out.logits

    def choose(self, scores: Any, batch: Batch) -> Best:
        rules, allowed = self._rules(batch.line_slot), scores
        if self._masks is not None:
            allowed = self._masks.applied(scores)
        if takes_more_than_best(rules):
            chosen = choose(allowed, rules, batch.line_slot, batch.line_position, self._ids)
            best = Best(allowed.amax(-1), chosen)
        else:
            best = self._argmax.choose(allowed, batch)
        for row, lines, num_top in self._asked:
            self.logprobs[row] = logprobs(scores[lines], best.token_id[lines], num_top)
        return best

    def draft(self, out: Computed, slot: torch.Tensor, number: int) -> torch.Tensor:
        rules = self._draft_rules(slot, number)
        if not takes_more_than_best(rules):
            return self._argmax.draft(out, slot, number)
        logits, position = widened(out.logits, self._vocab_size), self._lengths[0][slot] + number
        return choose(logits, rules, slot, position, self._ids)


class Masks:
    """What grammars allow, for G of the L lines."""

    def __init__(self, lines: torch.Tensor | None, bits: torch.Tensor) -> None:
        """lines: [G] int64, None: all; bits: [G, words] int32, of the tokens that may be chosen."""
        self._lines, self._bits = lines, bits

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [L, V] with -inf for tokens that a line's grammar forbids."""
        if self._lines is None:
            return self._forbid(logits.clone())
        return logits.index_copy(0, self._lines, self._forbid(logits[self._lines]))

    def _forbid(self, scores: torch.Tensor) -> torch.Tensor:
        places = torch.arange(32, dtype=torch.int32, device=scores.device)
        for span in spans(*scores.shape):
            may = ((self._bits[span].unsqueeze(2) >> places) & 1).flatten(1)[:, : scores.shape[1]]
            scores[span].masked_fill_(~may.to(torch.bool), -torch.inf)
        return scores
