"""Prompt lookup against a search through the whole text."""

import random

import pytest
import torch

from hemiola.plugins.step import forms
from hemiola.plugins.step.plan import DRAFTS, TOTAL


def searched(ids: list[int], min_n: int, max_n: int, num_drafts: int) -> list[int]:
    """The definition: longest suffix first, its latest earlier occurrence, continued as a period would."""
    for n in range(min(max_n, len(ids) - 1), min_n - 1, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[-n:]:
                text = list(ids)
                for place in range(end, end + num_drafts):
                    text.append(text[place])
                return text[len(ids) :]
    return []


@pytest.mark.parametrize(
    "ids, min_n, max_n, drafts",
    [
        pytest.param([1, 2, 3, 1, 2], 1, 3, [3, 1, 2], id="continues the match"),
        pytest.param([1, 2, 3, 4], 1, 3, [], id="nothing repeats"),
        pytest.param([7, 7, 7], 1, 3, [7, 7, 7], id="overlap is a period"),
        pytest.param([1, 2, 9, 1, 2, 8, 1, 2], 2, 2, [8, 1, 2], id="the latest occurrence"),
        pytest.param(
            [5, 1, 2, 9, 6, 2, 8, 5, 1, 2], 1, 3, [9, 6, 2], id="a longer suffix wins over a later one"
        ),
        pytest.param([1, 2, 1], 2, 3, [], id="shorter than min_n"),
        pytest.param([1], 1, 3, [], id="one token"),
    ],
)
def test_a_proposal_is_what_followed_the_suffix(
    ids: list[int], min_n: int, max_n: int, drafts: list[int]
) -> None:
    for form in ("reference", "compiled"):
        assert proposed([ids], min_n, max_n, 3, form) == [drafts]


def proposed(texts: list[list[int]], min_n: int, max_n: int, num_drafts: int, form: str) -> list[list[int]]:
    """In one call, behind each text what an earlier one may have left there."""
    width, num = max(map(len, texts)) + num_drafts, len(texts)
    ids = torch.zeros(num + 1, width, dtype=torch.int32)
    lengths, plan = torch.zeros(4, num + 1, dtype=torch.int64), torch.zeros(num + 1, 10, dtype=torch.int32)
    for slot, text in enumerate(texts, 1):
        ids[slot, : len(text)], lengths[TOTAL, slot] = torch.tensor(text, dtype=torch.int32), len(text)
        plan[slot - 1, 4], plan[slot - 1, 6] = slot, num_drafts
    forms(form).look_up(plan, lengths, ids, min_n, max_n)
    found = lengths[DRAFTS, 1:].tolist()
    assert set(found) <= {0, num_drafts}
    return [
        line[len(text) : len(text) + n] for line, text, n in zip(ids[1:].tolist(), texts, found, strict=True)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_many_texts_at_once(seed: int) -> None:
    rng = random.Random(seed)
    min_n = rng.randint(1, 3)
    max_n = min_n + rng.randint(0, 3)
    texts = [rng.choices(range(rng.randint(1, 4)), k=rng.randint(1, 40)) for _ in range(20)]
    num_drafts = rng.choice([1, 3, 64])
    wanted = [searched(ids, min_n, max_n, num_drafts) for ids in texts]
    for form in ("reference", "compiled"):
        assert proposed(texts, min_n, max_n, num_drafts, form) == wanted, (seed, form)
