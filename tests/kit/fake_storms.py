"""Random turns of a loop over the fake session: everything at once (test_storms.py)."""

import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kit import starved
from kit.carried import Carried
from kit.fake_session import POISON, VOCAB, FakeSession, FakeUnits, hashed, oracle, resolved
from kit.guided import ASKED, EOS, compiled, guided_oracle
from kit.plain_sampling import edited
from kit.proposers import Scripted, shuffled

from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.cache.disk_file import header_bytes
from hemiola.runtime.choose.grammar import Stuck
from hemiola.runtime.schedule.pace import Pace
from hemiola.runtime.schedule.request import Request, new_request

NUM_TURNS = 200


def sizes_of(dice: random.Random) -> dict[str, int | bool]:
    max_rows = dice.choice([1, 2, 4, 4, 9])
    page_len = dice.choice([4, 8, 16])
    max_len = dice.choice([64, 96])
    least = max_len // page_len + 1
    prefix_cache = dice.random() < 0.8
    return {
        "max_rows": max_rows,
        "max_len": max_len,
        "page_len": page_len,
        "chunk_len": dice.choice([2, 4]),
        "max_step_tokens": dice.choice([max_rows, max_rows + 3, 17, 64]),
        "num_pages": dice.choice([least, least, least + 1, least + 3, 2 * least, 5 * least]),
        "num_drafts": dice.choice([0, 1, 3, 9]),
        "prefix_cache": prefix_cache,
        "num_slots": max_rows + 1 + (dice.choice([0, 1, 3, 20]) if prefix_cache else 0),
        "snapshot_interval": page_len * dice.choice([0, 0, 1, 3]) if prefix_cache else 0,
        "adaptive_drafts": dice.random() < 0.5,
        "pipeline_depth": dice.choice([0, 1, 1, 2]),
        "aging_s": dice.choice([0.0, 0.0, 7.0]),  # turns
        "host_cache_bytes": dice.choice([0, 4, 12, 60]) if prefix_cache else 0,  # units of a page
    }


def with_a_fake_clock(pace: Pace, seed: int) -> None:
    """What it is told of time comes from the seed: adaptive drafts are the same on any machine."""
    dice, timed = random.Random(seed), pace.timed
    per_draft = dice.choice([0.0, 0.1, 1.0])

    def told(num_rows: int, num_drafts: int, num_passes: int, step: float, drafting: float) -> None:
        step = (1 + 0.1 * num_rows + per_draft * num_drafts) * dice.uniform(0.5, 2)
        timed(num_rows, num_drafts, num_passes, step, 0.1 * per_draft * num_passes)

    pace.timed = told


class Chances(NamedTuple):
    """Of a storm's moves, in each turn."""

    arrive: float
    abort: float
    preempt: float
    flush: float


CHANCES = [
    Chances(0.25, 0.04, 0.1, 0.01),
    Chances(0.5, 0.2, 0.05, 0.01),
    Chances(0.9, 0.4, 0.05, 0.0),
    Chances(0.9, 1.0, 0.0, 0.0),
]
STARVED = Chances(0.7, 1.0, 0.0, 0.0)
PENALTIES = [
    {"presence_penalty": 2.0},
    {"frequency_penalty": 0.4},
    {"repetition_penalty": 1.5, "logit_bias": {3: 0.8}},
    {"bad_words_ids": [[5], [7, 9]], "min_tokens": 4, "stop_token_ids": [11, 12]},
]


class Storm:
    """Moves that may come at any time; each leaves the house in order."""

    def __init__(
        self, make_hand: Callable, dice: random.Random, folder: Path | None = None, **changes: float
    ) -> None:
        """folder: for a file below the host's memory; when it has been read is not the seed's to say."""
        self.dice = dice
        self.starved = dice.random() < 1 / 3
        sizes = sizes_of(dice) | (starved.sizes(dice) if self.starved else {}) | changes
        self.others = random.Random(repr(dice.getstate()))  # for what came later: earlier seeds' storms stay
        if folder is not None:
            sizes |= {"prefix_cache": True, "host_cache_bytes": self.others.choice([12, 30, 60])}
            unit_bytes = header_bytes(sizes["page_len"]) + FakeUnits.unit_bytes
            sizes |= {"disk_cache_dir": str(folder), "disk_cache_bytes": 100 * unit_bytes}
        self.chances = STARVED if self.starved else dice.choice(CHANCES)
        self.priorities = dice.choice([[0, 0, 0, 1, -1], [0, 5], [0, 1, 2, 3]])
        self.short = dice.choice(
            [0.0, 0.7]
        )  # chance of a short prompt; then long ones are of the last priority
        self.one_of, self.salt = dice.choice([0, 0, 60]), dice.randbytes(4)  # contexts behind which is NaN
        proposer: Scripted | None = None
        if sizes["num_drafts"]:
            proposer = shuffled(dice.randrange(2**30), self.next_token, VOCAB)
        session = FakeSession(resolved(**sizes), self.answer, hybrid=dice.random() < 0.8)
        self.hand = make_hand(session=session, proposer=proposer)
        scheduler = self.hand.loop.scheduler
        with_a_fake_clock(scheduler.pace, dice.randrange(2**30))
        self.num_turns = 0
        scheduler.clock = lambda: float(self.num_turns)
        self.max_len = session.config.max_len
        self.asked: dict[int, list[int]] = {}  # the output that a request must have
        self.ends: dict[int, str] = {}  # how it must end, if it does not end as it asked: by NaN
        self.may_fail: set[int] = set()  # requests one of whose rows may raise
        self.edited: dict[tuple[int, ...], int] = {}  # what follows a text of a request with rules of its own
        self.texts: list[list[int]] = []
        self.scored: dict[int, list[int]] = {}  # prompts of requests that asked for their log-probabilities
        self.carried = Carried(self.hand, self.others, self.is_broken)
        self.aborted: set[int] = set()
        self.seen: set[tuple[str, bool, int]] = set()  # moves, against requests in flight, of so many tokens
        self.reached: Counter[str] = Counter()
        self.reached["no recurrences"] += not scheduler.prefix.hybrid
        self.watched_from = self.salt[0] % 2 * 40  # turn: a router may come when much is cached
        self._watch()

    def _watch(self) -> None:
        """Count what the scheduler comes to do."""
        scheduler = self.hand.loop.scheduler
        give_way, make_room, preempt = scheduler._give_way, scheduler._make_room, scheduler._preempt

        def count_give_way(request: Request) -> bool:
            done = give_way(request)
            self.reached["a newcomer took the place of a worse one within a step"] += done
            return done

        def count_make_room(request: Request, num_tokens: int) -> bool:
            done = make_room(request, num_tokens)
            self.reached["a row got no page"] += not done
            return done

        def count_preempt(request: Request) -> None:
            self.reached["preempted"] += 1
            preempt(request)

        scheduler._give_way, scheduler._make_room, scheduler._preempt = (
            count_give_way,
            count_make_room,
            count_preempt,
        )

    def next_token(self, ids: Sequence[int]) -> int:
        return self.edited.get(tuple(ids), hashed(ids))

    def answer(self, ids: Sequence[int]) -> int | None:
        """The session's."""
        return None if self.is_broken(ids) else hashed(ids)

    def is_broken(self, ids: Sequence[int]) -> bool:
        return self.one_of > 0 and zlib.crc32(self.salt + bytes(ids)) % self.one_of == 0

    def arrive(self) -> None:
        dice = self.dice
        prompt, priority, num_tokens = self._hungry() if self.starved else self._mixed()
        params = {
            "max_tokens": num_tokens,
            "priority": priority,
            "cache_salt": dice.choice(["", "", "other"]),
            "num_drafts": dice.choice([None, None, 0]),
        }
        kind, pattern = dice.choice(["plain", "plain", "grammar", "penalties"]), None
        if kind == "grammar":
            pattern = dice.choice(list(ASKED))
            params["stop_token_ids"] = [EOS]
        elif kind == "penalties":
            params |= dice.choice(PENALTIES)
            params["max_tokens"] = max(params["max_tokens"], params.get("min_tokens", 0))
        n = dice.choice([1, 1, 1, 3])
        self.reached["n > 1"] += n > 1
        self.reached[kind] += 1
        for _ in range(n):
            self._submit(prompt, pattern, params)

    def _mixed(self) -> tuple[list[int], int, int]:
        """A prompt, its priority, how many tokens it asks for."""
        dice = self.dice
        is_short = dice.random() < self.short
        prompt = dice.choices(range(VOCAB), k=dice.randint(1, 6 if is_short else 40))
        if self.texts and dice.random() < 0.6 - is_short:
            text = dice.choice(self.texts)
            prompt = text[: dice.randint(1, len(text))] + prompt[: dice.randint(0, 9)]
        priorities = self.priorities if is_short or not self.short else self.priorities[-1:]
        return prompt[: self.max_len - 1], dice.choice(priorities), dice.randint(1, 30)

    def _hungry(self) -> tuple[list[int], int, int]:
        if starved.better_comes(self.dice, self.hand.loop.scheduler):
            return [self.dice.randrange(VOCAB)], 0, self.dice.randint(1, 8)
        return self.dice.choices(range(VOCAB), k=self.dice.choice([1, 8])), 5, 30

    def _submit(self, prompt: list[int], pattern: str | None, params: dict) -> None:
        hand, raises_at = self.hand, self.dice.choice([0, 0, 0, 0, 0, 0, 0, self.dice.randint(1, 9)])
        if self.others.random() < 0.1:
            params = params | {"prompt_logprobs": self.others.choice([0, 2])}
        grammar = None if pattern is None else compiled(pattern)
        alone = new_request(0, prompt, SamplingParams(**params), hand.bounds)
        output = self._output(alone, prompt, pattern)
        broken = [self.is_broken([*prompt, *output[:at]]) for at in range(len(output))]
        sound_len = [*broken, True].index(True)
        given_len = self._given_len(min(sound_len, len(output) - 1))
        listener = self._listener(raises_at)
        request_id = hand.submit(prompt, grammar, listener, output[:given_len], **params)
        request = hand.requests[request_id - 1]
        if raises_at:
            self.may_fail.add(request_id)
        if raises_at and request.guide is not None:
            self._break(request, raises_at)
        for at, token_id in enumerate(output):
            self.edited[(*prompt, *output[:at])] = token_id
        self.asked[request_id] = output[given_len:sound_len]
        if any(broken):
            self.ends[request_id] = f"NaN for the token at position {len(prompt) + sound_len}"
        self.texts.append(prompt + output)
        if "prompt_logprobs" in params:
            self.scored[request_id] = prompt
            at = next((n for n in range(1, len(prompt)) if self.is_broken(prompt[:n])), 0)
            if at:
                self.ends[request_id], self.asked[request_id] = f"NaN for the token at position {at}", []

    def _given_len(self, most: int) -> int:
        """Tokens of its output that another engine chose."""
        given_len = self.others.randint(0, most) if self.others.random() < 0.1 else 0
        self.reached["an output went on"] += given_len > 0
        return given_len

    def _listener(self, raises_at: int) -> Callable[[Piece], None]:
        """A user whose piece of this number raises, unless it is the last."""
        heard = [0]

        def hear(piece: Piece) -> None:
            heard[0] += 1
            if heard[0] == raises_at and piece.finish_reason is None:
                self.reached["a listener raised"] += 1
                raise RuntimeError("the user's")

        return hear

    def _output(self, request: Request, prompt: list[int], pattern: str | None) -> list[int]:
        """What a request alone would get."""
        most, ids = len(request.ids) - len(prompt), list(prompt)
        if pattern is not None:
            return guided_oracle(prompt, most, pattern)
        if not request.rule.edits_logits and not request.stop_ids:
            return oracle(prompt, most)
        while len(ids) < len(request.ids):
            scores = [0.0] * VOCAB
            scores[hashed(ids)] = 1.0
            scores = edited(scores, request.rule, ids)
            ids.append(scores.index(max(scores)))
            if ids[-1] in request.stop_ids:
                break
        return ids[len(prompt) :]

    def _break(self, request: Request, at: int) -> None:
        """Its grammar raises when it has been asked so often."""
        guide, error = request.guide, self.dice.choice([Stuck("no way"), RuntimeError("the library's")])
        assert guide is not None
        follow, calls = guide.follow, [0]

        def follow_and_raise(ids: Sequence[int], drafts: Sequence[int] = ()) -> int:
            calls[0] += 1
            if calls[0] == at:
                self.reached["a grammar raised"] += 1
                raise error
            return follow(ids, drafts)

        guide.follow = follow_and_raise

    def abort(self) -> None:
        """Anyone who has not heard of an end, at times one who has; or one that runs."""
        going = [r for r in self.hand.requests if self.dice.random() < 0.02 or not self.hand.ended(r.id)]
        if self.starved:
            going = starved.leaves(self.hand.loop.scheduler)
        elif self.dice.random() < 0.5:
            going = [r for r in self.hand.loop.scheduler.running if r.finish_reason is None]
        if going:
            request = self.dice.choice(going)
            self._see("abort", request)
            self.aborted.add(request.id)
            self.hand.loop.abort(request.id)

    def preempt(self) -> None:
        running = [r for r in self.hand.loop.scheduler.running if r.finish_reason is None]
        if running:
            request = self.dice.choice(running)
            self._see("preempt", request)
            self.hand.preempt(request)

    def _see(self, move: str, request: Request) -> None:
        self.seen.add((move, request.in_flight > 0, request.total_len - request.prompt_len))

    def flush(self) -> None:
        self.hand.loop.scheduler.prefix.flush()

    def turn(self) -> None:
        scheduler = self.hand.loop.scheduler
        if self.num_turns == self.watched_from:
            self.hand.watch_cache()
        self.num_turns += 1
        if self.texts and self.others.random() < 0.1:
            self.carried.begin(self.others.choice(self.texts)[: self.max_len - 1], self.num_turns)
        self.carried.end(self.num_turns)
        self.hand.turn()
        self.reached["requests of two priorities ran"] += (
            len({r.params.priority for r in scheduler.running}) > 1
        )
        self.reached["waiting improved a priority"] += any(
            r.priority < r.params.priority for r in scheduler.running
        )
        self.reached["all pages were held"] += scheduler.prefix.num_available == 0
        session, pages = self.hand.loop.storage, scheduler.prefix.pages
        assert (session.pages[pages._free] == POISON).all(), "somebody wrote a page that nobody owns"

    def rage(self) -> None:
        moves = {name: getattr(self, name) for name in Chances._fields}
        for _ in range(NUM_TURNS):
            for name, chance in zip(moves, self.chances, strict=True):
                if self.dice.random() < chance and (name != "arrive" or self.has_room):
                    moves[name]()
            self.turn()

    @property
    def has_room(self) -> bool:
        """While very many wait nobody arrives: the steps in which they end would be most of a storm."""
        scheduler = self.hand.loop.scheduler
        few_wait = len(scheduler.waiting) < 4 or (
            starved.last_rests(scheduler) if self.starved else len(scheduler.waiting) < 5
        )
        return few_wait and len(self.asked) < 100

    def end(self) -> None:
        while not (self.hand.idle and self.carried.rests):
            self.turn()
        for request_id in self.asked:
            self._check(request_id)
        self.reached["prefixes went and came"] += min(self.carried.num_read, self.carried.num_written)
        scheduler = self.hand.loop.scheduler
        if (disk := scheduler.prefix.disk) is not None:
            scheduler.prefix.save()
            disk.close()
            scheduler.audit()
            scheduler.prefix.disk = None
        scheduler.prefix.flush()
        scheduler.audit()
        assert scheduler.prefix.pages.num_free == scheduler.prefix.pages.num_pages - 1, "pages are lost"
        assert scheduler.slots.num_free == scheduler.slots.num_slots - 1, "slots are lost"

    def _check(self, request_id: int) -> None:
        hand, output = self.hand, self.asked[request_id]
        got, last = hand.token_ids(request_id), hand.last(request_id)
        assert got == output[: len(got)], f"request {request_id}"
        num_ends = sum(piece.finish_reason is not None for piece in hand.pieces[request_id])
        if last.finish_reason is None:
            assert request_id in self.may_fail, "it never ended"
            assert hand.requests[request_id - 1].finish_reason == "cancelled" and num_ends == 0
            return
        assert num_ends == 1
        first_hit = hand.first_hits.get(hand.requests[request_id - 1].chain, 0)
        assert last.metrics.cached_tokens == first_hit, "told of what it found when it began again"
        self.reached[last.finish_reason] += 1
        if last.finish_reason == "cancelled":
            assert request_id in self.aborted
        elif last.finish_reason == "error" and request_id in self.may_fail and "NaN" not in str(last.error):
            assert str(last.error).startswith("structured_outputs: "), last
        else:
            assert len(got) == len(output), last
            assert (last.finish_reason == "error") == (request_id in self.ends), last
            assert self.ends.get(request_id, "") in (last.error or ""), last
            self.reached["NaN"] += request_id in self.ends
        if request_id in self.scored and got:
            self._check_scores(self.scored[request_id], hand.pieces[request_id])
        drafted, accepted = (sum(counts) for counts in (last.metrics.drafted, last.metrics.accepted))
        self.reached["drafts stayed"] += accepted
        self.reached["drafts fell"] += drafted - accepted

    def _check_scores(self, prompt: list[int], pieces: list[Piece]) -> None:
        (found,) = [piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None]
        none, *scores = found
        assert none is None and [score.token_id for score in scores] == prompt[1:]
        total = math.log(math.e + VOCAB - 1)
        for at, score in enumerate(scores, 1):
            expected = (hashed(prompt[:at]) == prompt[at]) - total
            assert abs(score.logprob - expected) < 1e-4, f"position {at} of {prompt}"
        self.reached["a prompt was scored"] += 1
