"""A CPU's step as one call into compiled code, without Python between its ops.

Every pass of an MTP head behind the first is a recording of its own, which is repeated. Rows that take more
than an argmax are left to eager.py.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from hemiola.plugins.cpu.code import Recorder, View
from hemiola.plugins.cpu.steps import RecordedStep, run_all
from hemiola.plugins.sizes import FreeSize
from hemiola.plugins.step.plan import ANSWERS, COLUMNS
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.device.head import Head
from hemiola.runtime.device.memory import free_bytes_of_host
from hemiola.runtime.device.session import Computed
from hemiola.runtime.errors import Refused, any_of
from hemiola.runtime.schedule.plan import Plan
from hemiola.runtime.step.choice import Argmax
from hemiola.runtime.step.output import StepOutput
from hemiola.runtime.step.pack import PackedPlan
from hemiola.runtime.step.parts import EngineParts
from hemiola.runtime.step.program import MARKS, Batch, Drafting, Feed, Pairs, Program, ProgramParts, StepState

Record = Callable[[Recorder, Mapping[str, View]], list[View]]
SIZES = ("rows", "tokens", "lines", "pairs", "drafting", "width")
INPUTS = [*SIZES, "number", "plan", "told", "logits"]


class Recorded:
    """`records`: trunk and head as parts of a step. ranks: see LoadedSegment."""

    def __init__(
        self,
        parts: EngineParts,
        records: Sequence[Record],
        poisoned: bool = False,
        ranks: Head | None = None,
    ) -> None:
        self._ops, self._config, self._ledger, self._table, self._ring = parts
        config, ring, table = self._config, self._ring, self._table
        self._records, self._poisoned, self._ranks = records, poisoned, ranks
        self._width = config.vocab_size  # of the logits that a rank has
        self._has_head = config.drafts == "mtp"
        # what one pass of the head leaves for the next
        self._states = torch.empty(config.max_rows, ring.shape[-1])
        self._pages = torch.empty(config.max_rows, table.on_device.shape[1], dtype=torch.int32)
        self._places = torch.arange(config.max_rows, dtype=torch.int32)
        self.logits = torch.empty(0)  # of the last step
        if self._has_head:
            self._steps = [self._record(kind) for kind in ("begin", "again", "end")]
        else:
            self._steps = [self._record("step")]
        self._check_room()
        self.num_steps = 0

    def _check_room(self) -> None:
        """A program may compute anything for a token, and the kernel promises more than it has."""
        config = self._config
        rows, tokens, width = config.max_rows, config.max_step_tokens, config.num_drafts + 1
        lines = min(tokens, rows * width)
        sizes: dict[str, int] = dict(zip(SIZES, (rows, tokens, lines, tokens, rows, width), strict=True))
        needed, free = max(step.room(sizes) for step in self._steps), free_bytes_of_host()
        if needed > free:
            what = f"a step of {tokens} tokens"
            message = f"there is no memory for {what}: it takes {needed} bytes, and {free} are free"
            way_out = ("lower ", *any_of("max_step_tokens", "max_rows", "num_pages"))
            raise Refused("exhausted", "max_step_tokens", message=message, way_out=way_out)

    def open(self, slot_id: int, rule: Rule) -> None:
        """Nothing of a request is kept here."""

    def fit(self, plan: Plan) -> bool:
        """Whether no row takes more than an argmax."""
        for row in plan.rows:
            request = row.request
            if (row.chooses and not (request.rule.plain and request.guide is None)) or row.scored is not None:
                return False
        return True

    def launch(self, plan: Plan, packed: PackedPlan) -> StepOutput:
        """All of it is done when this returns."""
        numbers, sizes = packed
        told = array("q", bytes(8 * (MARKS + sizes.rows * (sizes.width + ANSWERS))))
        if sizes.lines > self.logits.shape[0]:
            self.logits = torch.empty(sizes.lines, self._width)
        places = 0, numbers.buffer_info()[0], told.buffer_info()[0], self.logits.data_ptr()
        inputs: dict[str, int] = dict(zip(INPUTS, (*sizes[: len(SIZES)], *places), strict=True))
        first, *rest = self._steps
        steps = [(first, inputs)]
        if rest:
            again, end = rest
            steps += [(again, inputs | {"number": number}) for number in range(1, sizes.passes)]
            steps.append((end, inputs))
        run_all(steps)
        self.num_steps += 1
        return StepOutput(plan, told, sizes.width, 0, {})

    def _record(self, kind: str) -> RecordedStep:
        """The whole step; or its begin, one more pass of the head, its end."""
        code, (rows, tokens, lines, pairs, drafting, width) = Recorder(), map(FreeSize, SIZES)
        told = code.input("told", (1, 1), torch.int64)
        line = width + ANSWERS
        answers = replace(told, offset=MARKS, shape=(rows, line), strides=(line, 1))
        plan = code.input("plan", (rows + 1, len(COLUMNS)), torch.int32)
        feed = Feed(
            plan, None, told, answers, tokens, lines, pairs, drafting, width, 1, 0, Argmax(self._ops)
        )  # fmt: skip
        program = self._program(code)
        match kind:
            case "step":
                program.step(feed)
            case "begin":
                made = program.begin(feed)
                assert made is not None
                self._leave(made)
            case "again":
                given = Drafting(
                    self._given(code, self._pages, rows), told, self._given(code, self._states, drafting)
                )
                self._leave(program.draft_again(feed, given, FreeSize("number")))  # type: ignore[arg-type]
            case "end":
                program.end(feed)
        return RecordedStep(code, INPUTS, self._poisoned)

    def _program(self, code: Recorder) -> Program:
        ledger = self._ledger

        def trunk(batch: Batch) -> Computed:
            logits, hidden = self._records[0](code, batch._asdict())
            logits.buffer.input, self._width = "logits", logits.shape[1]
            return Computed(logits, hidden, self._ranks)  # type: ignore[arg-type]

        def head(pairs: Pairs) -> Computed:
            logits, hidden = self._records[-1](code, pairs._asdict())
            return Computed(logits, hidden, self._ranks)  # type: ignore[arg-type]

        state = StepState(*map(code.given, (self._table.on_device, ledger.lengths, ledger.ids, self._ring)))
        parts = ProgramParts(trunk, head, lambda num: self._given(code, self._places, num))
        return Program(self._ops, self._config, parts, state)

    def _leave(self, drafting: Drafting) -> None:
        """For the next pass, in memory that stays."""
        drafting.page_table.buffer.tensor = self._pages
        drafting.hidden.buffer.tensor = self._states

    def _given(self, code: Recorder, tensor: torch.Tensor, num: FreeSize) -> View:
        """The first lines of a tensor that stays."""
        whole = code.given(tensor)
        return replace(whole, shape=(num, *whole.shape[1:]))
