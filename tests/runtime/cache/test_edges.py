"""How long a hit is, and where snapshots are wanted."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hemiola.runtime.cache.edges import hit_len, wanted_edges

P = 4  # tokens in a page


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 12), st.none() | st.sets(st.integers(1, 12)))
def test_hit_len_is_the_longest_that_has_everything(
    known_len: int, page_len: int, num_cached: int, edges: set[int] | None
) -> None:
    """Common invariant of all layers: nobody's part is longer or shorter than the others'."""
    snapshots = None if edges is None else {edge * page_len for edge in edges}
    fitting = [0]
    for length in range(known_len):
        on_edge = length > 0 and length % page_len == 0
        if on_edge and length <= num_cached * page_len and (snapshots is None or length in snapshots):
            fitting.append(length)
    assert hit_len(known_len, page_len, num_cached * page_len, snapshots) == max(fitting)


@pytest.mark.parametrize(
    ("start", "stop", "prompt_len", "junction", "interval", "expected"),
    [
        (0, 3, 3, 0, 0, []),
        (0, 4, 4, 0, 0, [4]),  # behind the whole prompt, where its continuation may start
        (0, 5, 5, 0, 0, [4]),
        (0, 8, 8, 0, 0, [4, 8]),
        (0, 9, 9, 0, 0, [8]),
        (0, 19, 19, 0, 0, [16]),
        (0, 12, 19, 0, 0, []),
        (12, 16, 19, 0, 0, [16]),
        (16, 19, 19, 0, 0, []),
        (0, 19, 19, 8, 0, [8, 16]),
        (8, 19, 19, 8, 0, [16]),
        (0, 19, 19, 16, 0, [16]),
        (0, 19, 19, 0, 8, [8, 16]),
        (0, 19, 19, 4, 12, [4, 12, 16]),
        (18, 19, 18, 0, 0, []),
        (18, 20, 18, 0, 0, [20]),
        (18, 31, 18, 0, 0, [28]),  # the newest only
        (18, 31, 18, 0, 8, [24, 28]),
        (20, 24, 18, 0, 8, [24]),
    ],
)
def test_wanted_edges(
    start: int, stop: int, prompt_len: int, junction: int, interval: int, expected: list[int]
) -> None:
    assert wanted_edges(start, stop, prompt_len, P, junction, interval) == expected


@given(st.integers(1, 80), st.integers(0, 10), st.integers(0, 3), st.data())
def test_wanted_edges_do_not_depend_on_how_a_prompt_is_cut(
    prompt_len: int, junction: int, interval: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, prompt_len), max_size=5)) | {0, prompt_len})
    whole = wanted_edges(0, prompt_len, prompt_len, P, junction * P, interval * P)
    parts = [
        edge
        for start, stop in pairwise(cuts)
        for edge in wanted_edges(start, stop, prompt_len, P, junction * P, interval * P)
    ]
    assert parts == whole
