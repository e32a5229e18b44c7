"""Prompt lookup against a search through the whole text."""

import random

import pytest

from hemiola.runtime.drafts.ngram import NgramIndex


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
    index = NgramIndex(min_n, max_n)
    index.extend(ids)
    assert index.propose(3) == drafts


@pytest.mark.parametrize("seed", range(20))
def test_arriving_in_pieces_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    min_n = rng.randint(1, 3)
    max_n = min_n + rng.randint(0, 3)
    index, ids = NgramIndex(min_n, max_n), []
    for _ in range(60):
        piece = [rng.randrange(4) for _ in range(rng.randint(0, 3))]
        ids += piece
        index.extend(piece)
        num_drafts = rng.choice([1, 3, 64])
        assert index.propose(num_drafts) == searched(ids, min_n, max_n, num_drafts), (seed, ids)
