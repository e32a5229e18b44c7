"""The state in a slot is a function of the text: after any step, and after ten thousand tokens."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from kit.engine_hand import EngineHand, Wanted, right_and_wrong
from kit.grid import GDN, KDA, MAMBA, Subject, int32, rel_error

B, U, K = 16, 8, 19
SMALL = {"page_len": B, "chunk_len": U, "num_drafts": K}


@pytest.mark.parametrize("kind", ["mtp", "mtp, right and wrong"])
@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_5", "three_convs"])
def test_edge_states_after_every_step_are_the_plain_runs(
    engine_hands: Callable[..., EngineHand], wanted: Wanted, family: str, kind: str
) -> None:
    """States, columns, records and MTP hidden states of every slot, bit for bit: behind cold prompts and
    hits, chunks, windows of every length, with neighbours, and after a preemption."""
    options: dict = {"num_drafts": 3, "max_rows": 3, "max_step_tokens": B + 3}
    if kind != "mtp":
        right = right_and_wrong(lambda ids, num: wanted(family, ids, num), seed=3)
        options |= {"num_drafts": K, "max_step_tokens": 3 * K + 9, "proposer": right}
    hand = engine_hands(family, "mtp", SMALL, **options)
    text = wanted.story(family)
    arrivals = {0: (3, 24), 4: (2 * B + 1, 12), 9: (2 * B + 7, 12), 12: (B, 7)}  # turn: prompt and output
    for turn in itertools.count():
        if turn in arrivals:
            length, num_tokens = arrivals[turn]
            hand.submit(text[:length], max_tokens=num_tokens)
        elif turn > max(arrivals) and hand.idle:
            break
        elif turn == 11:
            hand.preempt(hand.loop.scheduler.running[-1])
        hand.turn()
        hand.check_running()
    for request in hand.requests:
        hand.check(request.id, text[request.prompt_len : len(request.ids)])
    assert hand.loop.scheduler.prefix.statistics.num_hits > 0 and hand.loop.scheduler.num_preemptions > 0
    hand.check_contents()


NUM, CHUNK, WINDOW = 10_000, 16, 11  # tokens, chunk, drafts
SUBJECTS = [
    MAMBA,
    GDN,
    KDA,
    *(replace(subject, decay=0.002) for subject in (MAMBA, GDN, KDA)),
]
Step = tuple[int, int, int]  # final tokens, drafts, accepted ones among them


@cache
def sequential(subject: Subject) -> torch.Tensor:
    """The state after all tokens: one after the other, in fp64."""
    tokens = [token.double() for token in subject.tokens(NUM, seed=0)]
    states = [state.double() for state in subject.states(2, NUM, 0)]
    constants = [constant.double() for constant in subject.constants()]
    rows = (int32(0, NUM), int32(1), *[int32(0)] * 5)
    subject.form("reference")(*tokens, *constants, *states, *rows, CHUNK)
    return states[0][1]


def one_shot() -> Iterator[Step]:
    yield NUM, 0, 0


def chunks() -> Iterator[Step]:
    dice, done = random.Random(1), 0
    while done < NUM:
        num = min(dice.choice([1, CHUNK - 1, CHUNK, 100, 1000]), NUM - done)
        yield num, 0, 0
        done += num


def accepted_windows() -> Iterator[Step]:
    """The last step has no drafts, so that all tokens are final."""
    dice, done = random.Random(2), 1000
    yield 1000, 0, 0
    while done < NUM - 1:
        accepted = min(dice.choice([0, 3, WINDOW, WINDOW]), NUM - done - 2)
        yield 1, WINDOW, accepted
        done += 1 + accepted
    yield 1, 0, 0


@pytest.mark.parametrize("steps", [one_shot, chunks, accepted_windows], ids=lambda steps: steps.__name__)
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: f"{subject}-decay{subject.decay}")
def test_edge_states_after_10000_tokens(subject: Subject, steps: Callable[[], Iterator[Step]]) -> None:
    """fp32 in chunks, against fp64 one after the other: rounding neither grows nor piles up."""
    assert NUM % CHUNK == 0
    tokens, junk = subject.tokens(NUM, seed=0), subject.tokens(WINDOW, seed=1)
    states = subject.states(2, CHUNK, WINDOW)
    committed = edge = 0
    for final, drafts, accepted in steps():
        kept = [token[committed : committed + final + accepted] for token in tokens]
        inputs = [torch.cat((a, b[: drafts - accepted])) for a, b in zip(kept, junk, strict=True)]
        rows = (int32(0, final + drafts), int32(1), int32(committed), int32(edge), int32(drafts))
        subject.form("cpu")(*inputs, *subject.constants(), *states, *rows, int32(0), int32(0), CHUNK)
        edge = (committed + final) // CHUNK * CHUNK
        committed += final + accepted
    assert edge == committed == NUM
    assert rel_error(states[0][1], sequential(subject)) < 1e-5  # seen: 3e-7
