"""Random turns of a real engine: everything at once.

Requests come with prompts that begin, continue or leave greedy texts, several at once, of several
priorities; some draw, some have penalties or forbidden words, some follow grammars, some want logprobs, of
their prompts, too. They are cancelled (in some storms one in every turn) and preempted, the cache is
flushed, and in some storms faults strike rows (engine_faults.py). Pages and slots are as scarce as the
hand's sizes say; in a third of the storms short prompts with long answers come, which starve each other of
pages.

Who is not cancelled and not struck ends as asked. Every token and every logit that anybody got is the plain
run's, and so is what is cached.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence

from kit.engine_faults import Faults
from kit.engine_hand import VOCAB, EngineHand
from kit.guided import ASKED, EOS, compiled
from kit.proposers import Text

from hemiola.runtime.schedule.request import Request

RULES = {
    "drawn": {"temperature": 0.9, "top_p": 0.95, "top_k": 50},
    "drawn of all": {"temperature": 1.2, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "words": {
        "bad_words_ids": [[5], [7, 9]],
        "logit_bias": {11: 1.0},
        "min_tokens": 4,
        "stop_token_ids": [11],
    },
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "grammar": {},
    "grammar, drawn": {"temperature": 1.1, "logprobs": 1},
}


class EngineStorm:
    """Moves that may come at any time."""

    def __init__(
        self,
        hand: EngineHand,
        dice: random.Random,
        story: Callable[[int], list[int]],
        shortest: int,
        is_told: bool,
    ) -> None:
        self.hand, self.dice, self._is_told = hand, dice, is_told
        self._story, self._shortest = story, shortest
        self._priorities = dice.choice([[0, 0, 1, -1], [0, 5], [0, 1, 2, 3]])
        self._ruled = dice.choice([0.0, 0.3, 0.7])  # share of requests with RULES
        is_cut = bool(hand.manifest.segment("trunk").pieces)  # so it has no head to score prompts with
        self._kinds = [kind for kind in RULES if not (is_cut and kind == "prompt logprobs")]
        self._abort = dice.choice([0.04, 0.04, 0.6, 1.0])
        self._hungry = dice.random() < 1 / 3
        self._first = len(hand.requests)  # behind those of an earlier storm
        self._asked: list[tuple[str, list[int], str | None, dict, list[int]]] = []
        self._known: dict[int, list[int]] = {}  # outputs that an oracle knows
        self._aborted: set[int] = set()
        self.faults = Faults(hand, dice, dice.choice([0.0, 0.05, 0.2]))
        self.reached: Counter[str] = Counter()
        if hand.scripted is not None:
            self._script, hand.scripted.script = hand.scripted.script, self._remember

    @property
    def _requests(self) -> list[Request]:
        return self.hand.requests[self._first :]

    def _remember(self, text: Text, room: int) -> Sequence[int]:
        """Drafts from what another request has said behind the same text, right up to a random place."""
        own = text.ids[: text.total_len]
        for other in reversed(self._requests):
            said = other.ids[text.total_len : other.total_len][:room].tolist()
            if said and (other.ids[: text.total_len] == own).all():
                num_right = self.dice.choice([len(said), self.dice.randint(0, len(said))])
                return [*said[:num_right], *((token + 1) % VOCAB for token in said[num_right:])]
        return self._script(text, room)

    def _arrive(self) -> None:
        """n answers to a prompt; at times what was asked before is asked again."""
        dice = self.dice
        is_new = not self._asked or dice.random() < 0.7
        self._asked.append(self._new() if is_new else dice.choice(self._asked))
        kind, prompt, pattern, options, known = self._asked[-1]
        n = dice.choice([1, 1, 1, 2, 3])
        self.reached[kind] += 1
        self.reached["n > 1"] += n > 1
        for _ in range(n):
            request_id = self._submit(prompt, pattern, options)
            if known:
                self._known[request_id] = known

    def _new(self) -> tuple[str, list[int], str | None, dict, list[int]]:
        """A kind, a prompt, a pattern, options, and the output if an oracle knows it."""
        dice, text = self.dice, self._story(self.dice.randrange(3))
        length, num_tokens = dice.randint(self._shortest, 80), dice.randint(1, 16)
        if self._hungry:
            length, num_tokens = dice.randint(self._shortest, 24), dice.randint(20, 60)
        tail = dice.choices(range(VOCAB), k=dice.choice([0, 0, 1, self.hand.config.page_len]))
        tail = tail[: self.hand.config.max_len - 1 - length]
        kind = dice.choice(self._kinds) if dice.random() < self._ruled else "plain"
        options = {
            "max_tokens": num_tokens,
            "priority": dice.choice(self._priorities),
            "num_drafts": dice.choice([None, None, 0]),
            "cache_salt": dice.choice(["", "", "other"]),
        } | RULES.get(kind, {})
        options["max_tokens"] = max(num_tokens, options.get("min_tokens", 0))
        pattern = dice.choice(list(ASKED)) if kind.startswith("grammar") else None
        if pattern is not None:
            options["stop_token_ids"] = [EOS]
        is_known = self._is_told and not tail and kind in ("plain", "logprobs", "prompt logprobs")
        known = text[length : length + num_tokens] if is_known else []
        return kind, text[:length] + tail, pattern, options | {"seed": dice.getrandbits(64)}, known

    def _submit(self, prompt: list[int], pattern: str | None, options: dict) -> int:
        grammar = None if pattern is None else compiled(pattern, self.hand.config.vocab_size)
        request_id = self.hand.submit(prompt, grammar, **options)
        if pattern is not None:
            self.hand.patterns[request_id] = pattern
        return request_id

    def turn(self) -> None:
        """One, and what may come before it.

        Nobody arrives while very many wait: their steps, in which nothing else happens, would be most of it.
        """
        hand, dice = self.hand, self.dice
        going = [request.id for request in self._requests if not hand.ended(request.id)]
        if dice.random() < 0.25 and len(going) < 8 + 2 * hand.config.max_rows:
            self._arrive()
        struck = [request.id for request in self.faults.alive if not hand.ended(request.id)]
        if going and dice.random() < self._abort:
            self._cancel(dice.choice(going))
        elif struck and dice.random() < 0.2:  # before anybody has seen what it computed
            self._cancel(dice.choice(struck))
        running = hand.loop.scheduler.running
        if running and dice.random() < 0.08:
            hand.preempt(dice.choice(running))
        if dice.random() < 0.02:
            hand.loop.scheduler.prefix.flush()
        before = sum(request.leaving for request in running), hand.loop.scheduler.num_preemptions
        hand.turn()
        self.reached["preempted by the scheduler"] += hand.loop.scheduler.num_preemptions > sum(before)
        self.reached["requests of two priorities ran"] += len({r.params.priority for r in running}) > 1
        if dice.random() < 0.1 and not self.faults.outstanding:
            hand.check_contents()

    def _cancel(self, request_id: int) -> None:
        self._aborted.add(request_id)
        self.hand.loop.abort(request_id)

    def end(self) -> None:
        """Let all end, and demand everything of it; the hand is as it was before."""
        hand, prefix = self.hand, self.hand.loop.scheduler.prefix
        hand.run()
        self.faults.stop()
        if hand.scripted is not None:
            hand.scripted.script = self._script
        hand.check_logits()
        hand.check_contents()
        for request in self._requests:
            self._check(request)
        hand.forget()
        prefix.flush()
        hand.audit()
        assert prefix.pages.num_free == prefix.pages.num_pages - 1, "pages are lost"
        assert prefix.slots.num_free == prefix.slots.num_slots - 1, "slots are lost"

    def _check(self, request: Request) -> None:
        hand, last = self.hand, self.hand.last(request.id)
        self.reached[str(last.finish_reason)] += 1
        assert last.metrics is not None
        self.reached["drafts stayed"] += sum(last.metrics.accepted)
        assert sum(piece.finish_reason is not None for piece in hand.pieces[request.id]) == 1
        assert hand.token_ids(request.id) == request.ids[request.prompt_len : request.total_len].tolist()
        match last.finish_reason:
            case "length":
                assert request.total_len == len(request.ids)
            case "stop":
                assert request.ids[request.total_len - 1] in request.stop_ids
            case "cancelled":
                assert request.id in self._aborted
            case _:
                assert request.id in self.faults.struck and "NaN" in str(last.error), last
        if request.id in self._known:
            is_whole = last.finish_reason == "length"
            (hand.check if is_whole else hand.check_start)(request.id, self._known[request.id])


def storm(
    hand: EngineHand,
    dice: random.Random,
    story: Callable[[int], list[int]],
    num_turns: int,
    shortest: int = 3,
    is_told: bool = True,
) -> Counter[str]:
    """So many turns, then an end; what was reached.

    story: one of three texts of at least 100 tokens, greedy from the shortest prompt on; or, not is_told,
    greedy elsewhere: then only the plain run says what comes.
    """
    made = EngineStorm(hand, dice, story, shortest, is_told)
    for _ in range(num_turns):
        made.turn()
    made.end()
    return made.reached
