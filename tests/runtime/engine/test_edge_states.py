"""The state in a slot is a function of the text: after any step, and after ten thousand tokens."""

import itertools
import math
import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from kit.engine_hand import PAGE as B
from kit.engine_hand import SMALL, EngineHand, Wanted, right_and_wrong

from hemiola.plugins import OPS
from hemiola.plugins.rows import next_edge

K = SMALL["num_drafts"]


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
Tensors = list[torch.Tensor]
Step = tuple[int, int, int]  # final tokens, drafts, accepted ones among them


def made(name: str, channels: int, bias: float, num: int, seed: int) -> tuple[Tensors, Tensors, Tensors, list]:
    """What an op gets: by token, by weight, slots full of NaN, attributes. A lower bias decays more slowly."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    ring = CHUNK + WINDOW
    if name == "mamba2":
        tokens = [randn(num, 3, 16), randn(num, 1, 32), randn(num, 1, 32), randn(num, 3)]
        weights = [torch.full((3,), bias), -torch.tensor([0.1, 1.0, 4.0]), torch.ones(3)]
        slots, attrs = [(3, 16, 32), (ring, 3, 16), (ring, 1, 32), (ring, 3)], [CHUNK, 0.0, math.inf]
    else:
        q, k = F.normalize(randn(2, num, 1, 16), dim=3)
        tokens = [q, k, randn(num, 3, 16), randn(num, 3, channels), randn(num, 3)]
        weights = [torch.full((3, channels), bias), -torch.tensor([0.1, 1.0, 4.0])]
        slots = [(3, 16, 16), (ring, 1, 16), (ring, 3, 16), (ring, 3, channels), (ring, 3)]
        attrs = [CHUNK]
    return tokens, weights, [torch.full((2, *shape), torch.nan) for shape in slots], attrs


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


@pytest.mark.parametrize("bias", [0.0, -6.0])
@pytest.mark.parametrize(("name", "channels"), [("mamba2", 0), ("delta", 1), ("delta", 16)])
def test_edge_states_after_10000_tokens(name: str, channels: int, bias: float) -> None:
    """One state, bit for bit, in one call, in chunks and in windows with rejected drafts; and beside fp64
    rounding neither grows nor piles up."""
    op, found = OPS[name], []
    tokens, weights, _, attrs = made(name, channels, bias, NUM, seed=0)
    junk = made(name, channels, bias, WINDOW, seed=1)[0]
    for steps in ([(NUM, 0, 0)], chunks(), accepted_windows()):
        slots, committed, edge = made(name, channels, bias, 1, seed=0)[2], 0, 0
        for final, drafts, accepted in steps:
            kept = [token[committed : committed + final + accepted] for token in tokens]
            inputs = [torch.cat((a, b[: drafts - accepted])) for a, b in zip(kept, junk, strict=True)]
            rows = torch.tensor([[0, final + drafts, drafts, 1, committed, edge, 0, 0]], dtype=torch.int32)
            op.bind("compiled", ())(*inputs, *weights, *slots, rows, *attrs)
            edge, committed = next_edge(committed, final, 0, CHUNK), committed + final + accepted
        assert edge == committed == NUM
        found.append(slots[0][1])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    wide = [[part.double() for part in parts] for parts in made(name, channels, bias, NUM, seed=0)[:3]]
    rows = torch.tensor([[0, NUM, 0, 1, 0, 0, 0, 0]], dtype=torch.int32)
    op.reference(*wide[0], *wide[1], *wide[2], rows, *attrs)
    expected = wide[2][0][1]
    assert (found[0] - expected).norm() / expected.norm() < 2e-6  # seen: 4e-7
