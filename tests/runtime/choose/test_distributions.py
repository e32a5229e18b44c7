"""Sequences drawn with drafts are distributed as the logits say: 8,000 draws, chi-square, p > 1e-3."""

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from kit.fake_session import FakeSession, resolved
from kit.proposers import Scripted
from scipy.stats import chisquare

from hemiola.runtime.device.session import Computed

VOCAB, LENGTH, NUM_DRAWS = 5, 3, 8_000
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))  # of what follows a token


class Chain(FakeSession):
    """A Markov chain, and nothing is checked."""

    def run(self, batch: object) -> Computed:
        logits = LOGITS[batch.token_ids[batch.logits_ids.long()].long()]
        return Computed(logits, torch.zeros(len(batch.token_ids), 1))


def expected(temperature: float) -> dict[tuple[int, ...], float]:
    chances = (LOGITS.double() / temperature).softmax(1)
    found = {}
    for ids in itertools.product(range(VOCAB), repeat=LENGTH):
        found[ids] = float(torch.stack([chances[a, b] for a, b in itertools.pairwise((1, *ids))]).prod())
    return found


def p_value(counts: Counter, chances: dict[tuple[int, ...], float]) -> float:
    """Sequences that are expected less than 5 times count together."""
    rare = [ids for ids, chance in chances.items() if chance * NUM_DRAWS < 5]
    cells = [(counts[ids], chance * NUM_DRAWS) for ids, chance in chances.items() if ids not in rare]
    if rare:
        cells.append((sum(counts[ids] for ids in rare), sum(chances[ids] for ids in rare) * NUM_DRAWS))
    return chisquare(*zip(*cells, strict=True)).pvalue


@pytest.mark.parametrize(
    ("drafts", "temperature"), [("none", 1.0), ("likely", 1.0), ("unlikely", 0.6), ("any", 1.0)]
)
def test_sequences(make_hand: Callable, drafts: str, temperature: float) -> None:
    def script(text: object, room: int) -> list[int]:
        ids = [int(text.ids[text.total_len - 1])]
        for at in range(room):
            row = LOGITS[ids[-1]]
            ids.append(
                int({"likely": row.argmax(), "unlikely": row.argmin(), "any": (text.id + at) % VOCAB}[drafts])
            )
        return ids[1:]

    num_drafts = 0 if drafts == "none" else 2
    config = resolved(max_rows=1000, max_step_tokens=4000, num_drafts=num_drafts, max_len=16)
    hand = make_hand(session=Chain(config), proposer=Scripted(script) if num_drafts else None)
    asked = [
        hand.submit([1], max_tokens=LENGTH, temperature=temperature, seed=seed) for seed in range(NUM_DRAWS)
    ]
    while not hand.idle:
        hand.loop.turn()
    counts = Counter(tuple(hand.token_ids(i)) for i in asked)
    chances = expected(temperature)
    print(f"p = {p_value(counts, chances)}")
    assert p_value(counts, chances) > 1e-3
    if drafts == "unlikely":
        wrong = dict(zip(chances, sorted(chances.values()), strict=True))
        assert p_value(counts, wrong) < 1e-6, "the test can fail"
