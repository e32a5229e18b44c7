"""A step op by op, at any size and with any rules."""

from array import array

import numpy as np
import torch

from hemiola.plugins.step.plan import ANSWERS, COLUMNS
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.choose.rules import Group, RecentGroups
from hemiola.runtime.choose.sampling import takes_more_than_best
from hemiola.runtime.device.session import Drafter, Trunk
from hemiola.runtime.device.transfer import fetch, upload
from hemiola.runtime.schedule.plan import Plan
from hemiola.runtime.step.choice import Argmax, ByRules, LogprobLines, Masks
from hemiola.runtime.step.output import StepOutput
from hemiola.runtime.step.pack import MasksOfRows, Ready
from hemiola.runtime.step.parts import EngineParts, program_of
from hemiola.runtime.step.program import MARKS, Chooser, Feed
from hemiola.runtime.step.prompt_lines import WithPrompts, most_lines
from hemiola.runtime.step.prompts import Prompts


class EagerSteps:
    """Runs any plan."""

    def __init__(
        self, parts: EngineParts, trunk: Trunk, head: Drafter | None, prompts: Prompts | None = None
    ) -> None:
        self._ops, self._config, self._ledger, self._table, _ = parts
        self._groups = RecentGroups(self._ledger.device)
        self.program = program_of(parts, lambda batch: trunk.run(batch), head)
        self._of_all_lines = program_of(parts, lambda batch: trunk.run_all(batch), None)
        self.prompts = prompts
        self._at_once = most_lines(self._config)

    def launch(self, plan: Plan, ready: Ready) -> StepOutput:
        """Start a step; its output can be read when a fence behind it has been passed."""
        numbers, sizes = ready.packed
        device = self._ledger.device
        lines = np.frombuffer(numbers, np.int32).reshape(-1, len(COLUMNS))
        table, changes = upload(device, lines, self._table.changes())
        told_drafts = self._config.num_drafts if ready.masks else 0
        line = sizes.width + ANSWERS + told_drafts
        told = torch.zeros(MARKS + sizes.rows * line, dtype=torch.int64, device=device)
        choice, scoring = self._choice(plan, ready.masks), None
        if any(row.scored is not None for row in plan.rows):
            scoring = WithPrompts(self._ops, choice, plan, device, self._at_once)
        feed = Feed(
            plan=table,
            changes=changes if len(changes) else None,
            marks=told,
            answers=told[MARKS:].view(sizes.rows, line),
            tokens=sizes.tokens,
            lines=sizes.lines,
            pairs=sizes.pairs,
            drafting=sizes.drafting,
            width=sizes.width,
            passes=sizes.passes,
            told_drafts=told_drafts,
            choice=scoring or choice,
        )
        self.run(plan, feed)
        logprobs = choice.logprobs if isinstance(choice, ByRules) else {}
        of_rows = {row: tuple(fetch(parts)) for row, parts in logprobs.items()}
        of_prompts = tuple(fetch(scoring.logprobs)) if scoring is not None else ()
        return StepOutput(plan, fetch([told])[0], sizes.width, told_drafts, of_rows, of_prompts)

    def run(self, plan: Plan, feed: Feed) -> None:
        """The step itself."""
        if isinstance(feed.choice, WithPrompts):
            self.program.step(feed, self._of_all_lines.forward)
        else:
            self.program.step(feed, self.prompts and self.prompts.forward)

    def _choice(self, plan: Plan, masks_of_rows: MasksOfRows) -> Chooser:
        """By the rules of the plan's rows."""
        if not masks_of_rows and all(row.request.rule.plain for row in plan.rows):
            return Argmax(self._ops)
        rules: list[Rule] = []  # of each line
        asked: list[LogprobLines] = []
        for n, row in enumerate(plan.rows):
            if row.chooses:
                rule, first = row.rule, len(rules)
                rules += [rule] * (1 + row.num_drafts)
                if rule.params.logprobs is not None:
                    asked.append(LogprobLines(n, slice(first, len(rules)), rule.params.logprobs))
        masks = self._masks(plan, masks_of_rows) if masks_of_rows else None
        if not (asked or masks or takes_more_than_best(rules)):
            return Argmax(self._ops)
        drafting = [row for row in plan.rows if row.reads and row.room > 0]

        def draft_rules(slot: torch.Tensor, number: int) -> list[Group]:
            return self._groups([row.rule for row in drafting])

        ledger, vocab_size = self._ledger, self._config.vocab_size
        of_ledger = (ledger.lengths, ledger.ids, vocab_size)
        return ByRules(self._ops, *of_ledger, lambda slot: self._groups(rules), draft_rules, masks, asked)

    def _masks(self, plan: Plan, of_rows: MasksOfRows) -> Masks | None:
        """None: no row that chooses follows a grammar."""
        lines, bits, end = array("q"), [], 0
        for n, row in enumerate(plan.rows):
            start, end = end, end + (1 + row.num_drafts) * row.chooses
            lines.extend(range(start, end) if n in of_rows else ())
            bits += of_rows.get(n, ())
        if not lines:
            return None
        return Masks(*upload(self._ledger.device, np.array(lines), np.stack(bits).view(np.int32)))
