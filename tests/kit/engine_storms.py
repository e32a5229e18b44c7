"""Random turns of a real engine: everything at once."""

import random
from collections.abc import Callable

from kit.engine_hand import VOCAB, EngineHand


def storm(
    hand: EngineHand,
    dice: random.Random,
    story: Callable[[int], list[int]],
    num_turns: int,
    shortest: int = 3,
) -> None:
    """Arrivals (prompts that begin, continue or leave greedy texts; several at once) of
    several priorities, aborts (in some storms in most turns), preemptions, flushes.

    Nobody arrives while very many wait: their steps, in which nothing else happens, would be most of it.

    story: one of three texts of at least 100 tokens, greedy from the shortest prompt on.
    """
    prefix, page_len = hand.loop.scheduler.prefix, hand.config.page_len
    known: dict[int, list[int]] = {}  # requests whose oracle we have
    aborted: set[int] = set()
    before = len(hand.requests)  # of an earlier storm
    most = 8 + 2 * hand.config.max_rows
    abort_chance = dice.choice([0.04, 0.04, 0.6])
    priorities = dice.choice([[0, 0, 1, -1], [0, 5]])

    def arrive() -> None:
        text = story(dice.randrange(3))
        length = dice.randint(shortest, 80)
        num_tokens = dice.randint(1, 16)
        prompt = text[:length]
        tail = dice.choices(range(VOCAB), k=dice.choice([0, 0, 1, page_len]))
        tail = tail[: hand.config.max_len - 1 - length]
        salt = dice.choice(["", "", "other"])
        options = {"priority": dice.choice(priorities), "num_drafts": dice.choice([None, None, 0])}
        for _ in range(dice.choice([1, 1, 1, 2])):  # n answers
            request_id = hand.submit(prompt + tail, max_tokens=num_tokens, cache_salt=salt, **options)
            if not tail:
                known[request_id] = text[length : length + num_tokens]

    def going() -> list[int]:
        return [request.id for request in hand.requests[before:] if not hand.ended(request.id)]

    for _ in range(num_turns):
        if dice.random() < 0.25 and len(going()) < most:
            arrive()
        if hand.requests and dice.random() < abort_chance:
            request_id = dice.choice(going() or [1])
            aborted.add(request_id)
            hand.loop.abort(request_id)
        running = hand.loop.scheduler.running
        if running and dice.random() < 0.08:
            hand.preempt(dice.choice(running))
        if dice.random() < 0.02:
            prefix.flush()
        hand.turn()
        if dice.random() < 0.1:
            hand.check_contents()
    hand.run()
    hand.check_logits()
    hand.check_contents()
    for request in hand.requests[before:]:
        last = hand.last(request.id)
        assert last.finish_reason == "length" or request.id in aborted, last
        if request.id in known:
            (hand.check_start if last.finish_reason == "cancelled" else hand.check)(
                request.id, known[request.id]
            )
    hand.forget()
    prefix.flush()
    hand.audit()
    assert prefix.pages.num_free == prefix.pages.num_pages - 1, "pages are lost"
    assert prefix.slots.num_free == prefix.slots.num_slots - 1, "slots are lost"
