"""How the tokens of a step are chosen: by an argmax, or by the rules of each line."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.choose.rules import Group
from hemiola.runtime.choose.sampling import choose, logprobs, spans, takes_more_than_best, widened
from hemiola.runtime.device.head import Best
from hemiola.runtime.device.session import Computed
from hemiola.runtime.step.program import Batch

Rules = Sequence[Rule] | Sequence[Group]


class LogprobLines(NamedTuple):
    """A row that reports logprobs."""

    row: int
    lines: slice
    num_top: int  # best tokens that it reports, beside the chosen one


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
        asked: Sequence[LogprobLines] = (),  # rows that report logprobs
    ) -> None:
        self._ops, self._argmax, self._lengths, self._ids = ops, Argmax(ops), lengths, ids
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
            chosen = choose(allowed, rules, batch.line_slot, batch.line_position, self._ids, self._ops)
            best = Best(allowed.amax(-1), chosen)
        else:
            best = self._argmax.choose(allowed, batch)
        for asked in _runs(self._asked):
            self._report(asked, scores, best.token_id)
        return best

    def _report(self, asked: Sequence[LogprobLines], scores: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Logprobs of rows whose lines follow each other, in one go."""
        first = asked[0].lines.start
        whole = slice(first, asked[-1].lines.stop)
        max_top = max(each.num_top for each in asked)
        made = logprobs(scores[whole], token_ids[whole], max_top, self._ops)
        for row, lines, num_top in asked:
            span = lines if first is None else slice(lines.start - first, lines.stop - first)
            chosen, top_ids, top = (part[span] for part in made)
            self.logprobs[row] = chosen, top_ids[:, :num_top], top[:, :num_top]

    def draft(self, out: Computed, slot: torch.Tensor, number: int) -> torch.Tensor:
        rules = self._draft_rules(slot, number)
        if not takes_more_than_best(rules):
            return self._argmax.draft(out, slot, number)
        logits, position = widened(out.logits, self._vocab_size), self._lengths[0][slot] + number
        return choose(logits, rules, slot, position, self._ids, self._ops)


def _runs(asked: Sequence[LogprobLines]) -> list[list[LogprobLines]]:
    """Those whose lines follow each other, together."""
    runs: list[list[LogprobLines]] = []
    for each in asked:
        if runs and runs[-1][-1].lines.stop == each.lines.start:
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


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
