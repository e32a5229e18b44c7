"""Real tiny engines, run by hand: what is asked of every one of them, whatever it goes through.

Storage is poisoned. After every turn ownership is audited; a request's hit is what `hit_len` makes of the
cache's content; `check_contents` recomputes all that is cached; `check_logits` compares with the plain run.
"""

import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from kit.demands import Demands, later
from kit.fake_session import check_inputs
from kit.guided import fitting
from kit.hand import Hand
from kit.narrow import by_token, is_poison
from kit.plain import Plain, places
from kit.proposers import Scripted, Text
from kit.rank_threads import RankThreads

from hemiola.runtime import manifest
from hemiola.runtime.abi import INPUTS
from hemiola.runtime.api import Logprob
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.choose.sampling import choose, logprobs, to_logprobs
from hemiola.runtime.config import Resolved, ServeConfig, resolve
from hemiola.runtime.device.find import find_device
from hemiola.runtime.device.head import Head
from hemiola.runtime.device.memory import Storage
from hemiola.runtime.device.session import Computed, Session
from hemiola.runtime.device.transfer import upload_ints
from hemiola.runtime.open import make_loop, prefix_cost
from hemiola.runtime.schedule.plan import Launched, Outcome, Plan, Row
from hemiola.runtime.schedule.request import Bounds, Request
from hemiola.runtime.step.bucket import Bucket
from hemiola.runtime.step.captured import Captured, CapturedResult
from hemiola.runtime.step.program import Batch, Forward
from hemiola.runtime.step.prompts import Prompts
from hemiola.runtime.step.ranked import RankedSteps
from hemiola.runtime.step.recorded import Recorded

VOCAB = 320
KINDS = {
    "plain": {"drafts": "none"},
    "mtp": {"drafts": "mtp"},
    "ngram": {"drafts": "ngram", "ngram_min": 1},
    "scripted": {"drafts": "ngram"},  # of which the proposer is replaced
}
# cuda: what runs on tiny engines runs on the GPU here, with graphs; rehearsal: the same on the CPU
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
CHUNK = 8 if DEVICE == "cpu" else 16  # the least that a GPU's kernels take
PAGE, NUM_DRAFTS = 2 * CHUNK, 3
SMALL = {"page_len": PAGE, "chunk_len": CHUNK, "num_drafts": 19}  # windows cross two pages


class Wanted:
    """The oracle's tokens, computed once: what follows the beginning of a greedy text is known by then.

    answer: of a family's checkpoint, what follows a prompt; a GPU's bf16 has answers of its own.
    """

    def __init__(self, answer: Callable[[str, list[int], int], list[int]]) -> None:
        self._answer = answer
        self._texts: dict[str, list[tuple[int, list[int]]]] = {}  # prompt_len, prompt and output

    def __call__(self, family: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        start, known = list(prompt), self._texts.setdefault(family, [])
        end = len(start) + num_tokens
        for prompt_len, text in known:
            if prompt_len <= len(start) and end <= len(text) and text[: len(start)] == start:
                return text[len(start) : end]
        output = self._answer(family, start, num_tokens)
        known.append((len(start), start + output))
        return output

    def story(self, family: str, number: int = 0, length: int = 25 * CHUNK) -> list[int]:
        """A greedy text: any part of it, given as a prompt, is continued by the rest.

        Three of them were looked at: nowhere do two experts or tokens tie within fp32's rounding (a text that
        began with 6, 6, 7 had two groups of experts 5e-8 apart, and arithmetics chose differently).
        """
        start = [20 + number, 6, 7]
        return start + self(family, start, length - 3)


def own_answer(
    tiny_engine: Callable[..., Path],
    plain_runs: Callable[[Path], Plain],
    family: str,
    prompt: list[int],
    num_tokens: int,
) -> list[int]:
    """The plain run's, where no oracle computes in the engine's numbers."""
    plain = plain_runs(tiny_engine(family, **SMALL | {"num_drafts": 0, "drafts": "none", "max_len": 1024}))
    return plain.greedy(prompt, len(prompt) + num_tokens)[len(prompt) :]


class Recorder:
    """A session that checks what it is given, and keeps the logits of the steps under way."""

    def __init__(self, session: Session, config: Resolved) -> None:
        self.session, self.config = session, config
        self.logits: deque[torch.Tensor] = deque()
        self.captured: list[torch.Tensor] = []  # where graphs leave them, in the order of capture

    def draft(self, **inputs: torch.Tensor) -> Computed:
        check_inputs(self.config, "draft", inputs)
        return self.session.draft(**inputs)

    def run(self, batch: Batch) -> Computed:
        return self._kept(batch, self.session.run(batch))

    def run_all(self, batch: Batch) -> Computed:
        return self._kept(batch, self.session.run_all(batch))

    def _kept(self, batch: Batch, out: Computed) -> Computed:
        check_inputs(self.config, "trunk", {name: getattr(batch, name) for name in INPUTS["trunk"]})
        logits = self._own(out)
        is_capturing = logits.is_cuda and torch.cuda.is_current_stream_capturing()
        (self.captured if is_capturing else self.logits).append(logits.clone())
        return out

    def _own(self, out: Computed) -> torch.Tensor:
        """This rank's logits: all would take all ranks."""
        return out._lines if self.ranks is not None else out.logits

    @property
    def recordings(self) -> list:
        return self.session.recordings

    @property
    def ranks(self) -> Head | None:
        return self.session.ranks

    @property
    def slowest(self) -> Callable[..., list[float]] | None:
        return self.session.slowest

    def watch(self, prompts: Prompts) -> None:
        """Keep logits without their padding, replayed ones, too."""
        forward = prompts.forward

        def forward_and_keep(plan: torch.Tensor, tokens: int, lines: int) -> Forward:
            num = len(self.logits)
            made = forward(plan, tokens, lines)
            if len(self.logits) > num:
                self.logits.pop()
            self.logits.append(self._own(made.out).clone())
            return made

        prompts.forward = forward_and_keep


class EngineHand(Hand):
    """A loop over a real engine, and what it must not do."""

    def __init__(
        self,
        engine_dir: Path,
        plain: Plain,
        kind: str,
        proposer: Scripted | None = None,
        shuffle: random.Random | None = None,
        **options: object,
    ) -> None:
        found = manifest.load(engine_dir)
        chosen = (
            {"adaptive_drafts": False, "aging_s": 0.0} | KINDS[kind] | options
        )  # how fast a step was must not matter here
        graphs = chosen.pop("cuda_graphs", DEVICE != "cpu")
        config = resolve(ServeConfig(**chosen), found, 2**30).model_copy(update={"cuda_graphs": graphs})
        device = find_device(engine_dir, found.arch)
        sizes = config.num_pages, config.num_slots
        self.storage = Storage(found.states, *sizes, poison=True, device=device)
        self.ranks = RankThreads(engine_dir, found, config) if found.tp > 1 else None
        group = self.ranks and self.ranks.groups[0]
        recorder = Recorder(Session(engine_dir, found, self.storage, config.drafts, group=group), config)
        given = config, self.storage, recorder, None, prefix_cost(found)
        loop = make_loop(*given, device=device, followers=self.ranks)
        self.recorder = recorder
        self.steps = steps = loop.steps.steps if isinstance(loop.steps, RankedSteps) else loop.steps
        if steps.eager.prompts is not None:
            recorder.watch(steps.eager.prompts)
        self._is_scripted = proposer is not None
        self.scripted = proposer if kind == "scripted" else None
        sizes = config.max_len, found.limits.max_len, found.vocab_size
        super().__init__(loop, Bounds(*sizes, eos_ids=()))
        if proposer is not None:
            proposer.drive(steps)
        self.config, self.plain, self.manifest = config, plain, found
        self.demands = Demands(found.promise == "bits")
        self.mtp = config.drafts == "mtp"
        self.recorded: dict[tuple[int, ...], list[torch.Tensor]] = {}  # logits behind a text, every copy
        self.proposed: dict[tuple[int, ...], list[tuple[list[int], Rule]]] = {}  # drafts of an MTP head
        self.patterns: dict[int, str] = {}  # what the outputs of requests with a grammar must match
        self.before_step: Callable[[Plan], None] = lambda plan: None
        self.num_plain_steps = 0  # whose rows all take the best token, and ask for nothing else
        self._shuffle = shuffle
        self._num_done = 0  # requests of which all has been demanded
        self._watch()

    def _watch(self) -> None:
        scheduler = self.loop.scheduler
        plan, commit = scheduler.plan, scheduler.commit

        def shuffled() -> Plan:
            made = plan()
            if self._shuffle is not None:
                self._shuffle.shuffle(made.rows)
            self.before_step(made)
            self.num_plain_steps += bool(made.rows) and all(map(_is_plain, made.rows))
            return made

        def keep(plan: Plan, outcome: Outcome) -> None:
            self._record(plan, outcome)
            commit(plan, outcome)

        scheduler.plan, scheduler.commit = shuffled, keep
        steps = self.steps
        launch = steps.launch_as

        def launch_and_keep(plan: Plan, *given: Any) -> Launched:
            output = launch(plan, *given)
            if not self._is_scripted:
                self._keep_drafts(plan)
            if self.config.cuda_graphs:
                self._look_at_table(plan)
            return output

        steps.launch_as = launch_and_keep
        if isinstance(steps.whole, Captured):
            self._watch_captured(steps.whole)
        elif steps.whole is not None:
            self._watch_recorded(steps.whole)

    def _watch_recorded(self, recorded: Recorded) -> None:
        """A step as one call keeps its logits."""
        launch = recorded.launch

        def launch_and_keep(plan: Plan, fitted: object) -> Launched:
            output, (_, sizes) = launch(plan, fitted), fitted
            self.recorder.logits.append(recorded.logits[: sizes.lines].clone())
            return output

        recorded.launch = launch_and_keep

    def _watch_captured(self, captured: Captured) -> None:
        """A step in a bucket: its logits are kept."""
        recorder, run = self.recorder, captured.run
        recorder.logits.clear()  # of warming up
        last = recorder.captured[-len(captured.buckets) :]  # behind the graphs of prompts; on a CPU none
        found = dict(zip(captured.buckets, last, strict=bool(last)))

        def run_and_keep(bucket: Bucket) -> CapturedResult:
            result = run(bucket)
            if found:
                recorder.logits.append(found[bucket].clone())
            return result

        captured.run = run_and_keep

    def _look_at_table(self, plan: Plan) -> None:
        """The device's copy is the host's."""
        held = self.loop.scheduler.prefix.pages
        slots = [(row.slot_id, slice(held.capacity[row.slot_id] // held.page_len)) for row in plan.rows]
        own, found = [held.table[place].tolist() for place in slots], later(self.steps.table.on_device)

        def look() -> None:
            (table,) = found()
            assert [table[place].tolist() for place in slots] == own

        self.look(plan, look)

    def _keep_drafts(self, plan: Plan) -> None:
        ledger, rows = self.steps.ledger, [row for row in plan.rows if row.room and self.mtp]
        if not rows:
            return
        found = later(ledger.total_len, ledger.num_drafts, ledger.ids)

        def look() -> None:
            total_lens, nums, all_ids = found()
            for row in rows:
                total_len, num = int(total_lens[row.slot_id]), int(nums[row.slot_id])
                assert num == row.room
                ids = all_ids[row.slot_id, : total_len + num].tolist()
                made = ids[total_len:], row.request.rule
                self.proposed.setdefault(tuple(ids[:total_len]), []).append(made)

        self.look(plan, look)

    def _record(self, plan: Plan, outcome: Outcome) -> None:
        logits, first = self.recorder.logits.popleft(), 0
        for n, row in enumerate(plan.rows):
            request = row.request
            if row.chooses and request.finish_reason is None and not request.starts_anew:
                token_ids = outcome.token_ids[n]
                ids = [*request.ids[: request.total_len].tolist(), *token_ids]
                for at in range(len(token_ids)):
                    known = tuple(ids[: request.total_len + at])
                    self.recorded.setdefault(known, []).append(logits[first + at])
            first += (1 + row.num_drafts) * row.chooses

    # Demands.

    def check(self, request_id: int, expected: Sequence[int]) -> None:
        """All tokens came, and they are these."""
        assert self.last(request_id).finish_reason == "length", self.last(request_id)
        self.check_start(request_id, expected)
        assert len(self.token_ids(request_id)) == len(expected)

    def check_start(self, request_id: int, expected: Sequence[int]) -> None:
        """What came is how these begin: it was stopped, or cancelled."""
        got = self.token_ids(request_id)
        prompt_len = self.requests[request_id - 1].prompt_len
        assert got == list(expected[: len(got)]), f"request {request_id}, prompt of {prompt_len}"

    def check_logits(self) -> None:
        """What every token was chosen from, whenever and for whom, is the plain run's, bit for bit."""
        due = self.requests[self._num_done :]
        texts = {tuple(request.ids[: request.total_len].tolist()): request for request in due}
        checked: set[tuple[int, ...]] = set()
        for ids, request in sorted(texts.items(), key=lambda found: -len(found[0])):
            if len(ids) == request.prompt_len:
                continue
            logits = self.plain.logits(ids[:-1])
            for at in range(request.prompt_len, len(ids)):
                for copy in self.recorded[ids[:at]]:
                    self.demands.same(copy, self._own(logits[at - 1]), f"{request.id}: position {at}")
                checked.add(ids[:at])
            self._check_tokens(request, logits[request.prompt_len - 1 :])
        for request in due:
            self._check_logprobs(request)
            self._check_prompt_logprobs(request)
        for ids in self.recorded.keys() - checked:  # of windows that ended early
            for copy in self.recorded[ids]:
                self.demands.same(copy, self._own(self.plain.logits(ids)[-1]), f"behind {len(ids)} tokens")
        self.demands.settle()

    def _own(self, logits: torch.Tensor) -> torch.Tensor:
        """Of a line [V], those that the first rank has."""
        return logits[: len(logits) // self.manifest.tp]

    def _check_tokens(self, request: Request, logits: torch.Tensor) -> None:
        """They are what the request's rule and its grammar choose from the logits [T, V] of its own text."""
        rule, device = request.rule, logits.device
        if not self.demands.bits and not (rule.greedy and not rule.edits_logits):
            return  # what is nearly the same may choose otherwise
        ids = torch.from_numpy(request.ids[None, : request.total_len]).to(device)
        if request.id in self.patterns:
            output = request.ids[request.prompt_len : request.total_len].tolist()
            logits = fitting(self.patterns[request.id], output, logits)
        position = torch.arange(request.prompt_len, request.total_len, device=device)
        chosen = choose(logits, [rule] * len(logits), torch.zeros_like(position), position, ids)
        self.demands.true((chosen == ids[0, position]).all(), f"{request.id}: tokens")

    def _check_logprobs(self, request: Request) -> None:
        """They are those of the request's own tokens, from the logits of its own text."""
        num_top = request.params.logprobs
        if num_top is None or request.total_len == request.prompt_len:
            return
        ids = request.ids[: request.total_len].tolist()
        logits = self.plain.logits(ids[:-1])[request.prompt_len - 1 :]
        token_ids = torch.tensor(ids[request.prompt_len :], device=logits.device)
        wanted = to_logprobs(token_ids.tolist(), *logprobs(logits, token_ids, num_top))
        mine = table([one for piece in self.pieces[request.id] for one in piece.logprobs or ()])
        self.demands.same(mine.to(logits.device), table(wanted).to(logits.device), f"{request.id}: logprobs")

    def _check_prompt_logprobs(self, request: Request) -> None:
        """They leave once, with the first token; and whatever was computed of them is right."""
        num_top, known = request.params.prompt_logprobs, request.prompt_logprobs
        told = [p.prompt_logprobs for p in self.pieces[request.id] if p.prompt_logprobs is not None]
        with_tokens = [piece.prompt_logprobs for piece in self.pieces[request.id] if piece.token_ids]
        assert told == with_tokens[: num_top is not None], f"{request.id}: prompt's logprobs in other pieces"
        for found in told:
            assert found == [None, *known] and len(found) == request.prompt_len
        if num_top is None or not known:
            return
        ids = request.ids[: request.prompt_len].tolist()
        logits = self.plain.logits(ids)[: len(known)]
        token_ids = torch.tensor(ids[1 : 1 + len(known)], device=logits.device)
        wanted = table(to_logprobs(token_ids.tolist(), *logprobs(logits, token_ids, num_top)))
        self.demands.same(table(known), wanted.to("cpu"), f"{request.id}: logprobs of the prompt")

    def check_drafts(self) -> None:
        """Every draft is the head's own continuation of a text: of its best tokens, or of its draws."""
        for text, found in sorted(self.proposed.items(), reverse=True):  # quick in this order
            known: dict[Rule | None, list[int]] = {}
            for drafts, rule in sorted(found, key=lambda made: -len(made[0])):
                key = None if rule.greedy and not rule.edits_logits else rule
                if key not in known:
                    known[key] = self.plain.drafts(text, len(drafts), rule)
                assert drafts == known[key][: len(drafts)], f"drafts behind {len(text)} tokens"

    def check_contents(self) -> None:
        """Every cached page and snapshot is what a plain run of its tokens leaves; what is free is poison."""
        prefix = self.loop.scheduler.prefix
        cached = sorted(prefix.contents(), key=lambda found: -found[1].edge)
        for token_ids, entry in cached:
            page = self.plain.page(token_ids)
            for name, wanted in page.items():
                if name.startswith("mtp.") and not self.mtp:
                    continue
                first = 1 if name.startswith("mtp.") and entry.edge == self.config.page_len else 0
                held = by_token(name, self.storage.tensors[name][entry.page_id])
                where = f"{name}: page {entry.page_id} up to {entry.edge}"
                self.demands.same(held[first:], wanted[first:], where)
            if entry.slot_id:
                self._check_slot(entry.slot_id, token_ids, entry.edge)
        self._check_poison()
        self.demands.settle()

    def _check_slot(self, slot_id: int, token_ids: Sequence[int], edge: int) -> None:
        """A slot that stands at an edge, with the records of the tokens behind it."""
        if not token_ids:
            return
        wanted, limits = self.plain.after(token_ids, edge).slot, self.manifest.limits
        there: dict[tuple[int, ...], torch.Tensor] = {}  # lines; layers share them
        for state in self.manifest.states:
            if state.kind != "slot" or (state.name == "mtp.hidden" and not self.mtp):
                continue
            held = self.storage.tensors[state.name][slot_id]
            lines = places(state, edge, len(token_ids), limits.chunk_len + limits.num_drafts)
            if lines == [] or (lines is None and edge == 0):
                continue  # a request that begins at 0 reads none
            where, own = f"{state.name}: slot {slot_id} at {edge}", wanted[state.name]
            if lines is not None:
                key = tuple(lines)
                if key not in there:
                    there[key] = upload_ints(held.device, lines)
                held, own = held[there[key]], own[there[key]]
            self.demands.same(held, own, where)

    def check_running(self) -> None:
        """With nothing under way: each running slot is the plain run's after its committed tokens."""
        scheduler = self.loop.scheduler
        for request in scheduler.running:
            assert request.in_flight == 0
            ids = request.ids[: request.committed_len].tolist()
            self._check_slot(request.slot_id, ids, scheduler.slots.edge[request.slot_id])
        self.demands.settle()

    def _check_poison(self) -> None:
        prefix, device = self.loop.scheduler.prefix, self.storage.device
        free = {"page": prefix.pages._free, "slot": prefix.slots._free}
        free = {kind: upload_ints(device, ids) for kind, ids in free.items()}
        for state in self.manifest.states:
            held = self.storage.tensors[state.name][free[state.kind]]
            self.demands.true(is_poison(held).all(), f"{state.name}: somebody wrote what nobody owns")

    def forget(self) -> None:
        """What was demanded of all there were: the next check is of requests to come."""
        assert self.idle
        self.recorded.clear()
        self.proposed.clear()
        self._num_done = len(self.requests)

    # Moves.

    def goes_on(self) -> bool:
        """One turn; whether anything is left to do."""
        self.turn()
        return not self.idle

    def end(self) -> None:
        """Run until all is done, and demand everything that holds of any run."""
        self.run()
        self.check_logits()
        self.check_drafts()
        self.check_contents()


def _is_plain(row: Row) -> bool:
    is_plain = row.request.rule.plain and row.request.guide is None
    return row.scored is None and (not row.chooses or is_plain)


def table(said: Sequence[Logprob]) -> torch.Tensor:
    """A line for each token, in float64: ids and log-probabilities."""
    lines = [[own.token_id, own.logprob, *(part for pair in own.top for part in pair)] for own in said]
    return torch.tensor(lines, dtype=torch.float64)


def windows(
    answers: Callable[[Sequence[int], int], list[int]], goods: Callable[[Text], int | None]
) -> Scripted:
    """Full windows with so many right drafts first, as `goods` says for each; None: no drafts."""

    def script(request: Text, room: int) -> list[int]:
        good = goods(request)
        if good is None:
            return []
        done = request.total_len - request.prompt_len
        ids = answers(request.ids[: request.prompt_len].tolist(), request.limit - request.prompt_len)
        return [
            token if at < good else (token + 1) % VOCAB for at, token in enumerate(ids[done : done + room])
        ]

    return Scripted(script)


def right_and_wrong(answers: Callable[[Sequence[int], int], list[int]], seed: int) -> Scripted:
    """Windows of any length, the right tokens up to a random place; a quarter of the windows is empty."""
    dice = random.Random(seed)

    def script(request: Text, room: int) -> list[int]:
        done = request.total_len - request.prompt_len
        ids = answers(request.ids[: request.prompt_len].tolist(), request.limit - request.prompt_len)
        ids = ids[done : done + dice.choice([0, 1, room, room])]
        good = dice.choice([0, 1, len(ids), len(ids)])
        return [token if at < good else (token + 1) % VOCAB for at, token in enumerate(ids)]

    return Scripted(script)
