"""Rows of the matrix and the reports on engines of 2 and 4 ranks, which are threads; all ledgers are compared
after every step. test_ranks.py mixes them, test_rank_storms.py leaves them to chance.

Kind "scripted" replaces the proposer of the first rank alone and is left out.
"""

import inspect
from collections.abc import Callable

import pytest
from kit.engine_hand import DEVICE, PAGE, EngineHand

from hemiola.runtime.step import ranked
from tests.runtime.engine import test_matrix as matrix
from tests.runtime.engine import test_matrix_cache as cache
from tests.runtime.engine import test_reports as reports

NEMOTRON, QWEN = "nemotron_h_divisible", "qwen3_5_moe_divisible"
MTP = {"kind": "mtp", "num_drafts": 3}
ROWS: list[tuple[Callable[..., None], str, int, dict[str, object]]] = [
    (
        matrix.test_m07_chunks_of_any_size_beside_windows_in_any_order,
        QWEN,
        4,
        {"kind": "mtp", "chunk": PAGE + 1},
    ),
    (matrix.test_m11_up_to_max_len, NEMOTRON, 2, {"kind": "ngram"}),
    (cache.test_m04_a_prompt_again_and_longer_and_with_another_token_anywhere, NEMOTRON, 2, MTP),
    (
        cache.test_m08_preemption_at_every_step,
        QWEN,
        2,
        {"kind": "mtp", "prefix_cache": True, "depth": 1, "runs": [0]},
    ),
    (cache.test_m18_a_conversation, NEMOTRON, 4, {}),
    (
        reports.test_001_text_degenerates_with_speculation_and_prefix_hits,
        QWEN,
        2,
        {"kind": "mtp", "pipeline_depth": 1},
    ),
    (
        reports.test_004_a_step_without_drafts_reads_the_state_before_the_accepted_ones,
        NEMOTRON,
        2,
        {"kind": "ngram", "pipeline_depth": 2},
    ),
]
CASES = [
    pytest.param(row, tp, {"family": family} | given, id=f"{row.__name__}-{family}-{tp}")
    for row, family, tp, given in ROWS
]
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="ranks run on CPUs")


@pytest.fixture
def num_ranks() -> list[int]:
    """Of the engines; a test fills it."""
    return []


@pytest.fixture
def engine_hands(engine_hands: Callable[..., EngineHand], num_ranks: list[int]) -> Callable[..., EngineHand]:
    """Those of other tests, of so many ranks."""

    def make(family: str, kind: str = "plain", built: dict | None = None, **options: object) -> EngineHand:
        return engine_hands(family, kind, (built or {}) | {"tp": num_ranks[0]}, **options)

    return make


@pytest.mark.parametrize(("row", "tp", "given"), CASES)
def test_a_row_with_ranks(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: list[int],
    row: Callable[..., None],
    tp: int,
    given: dict[str, object],
) -> None:
    monkeypatch.setattr(ranked, "CHECKED_EVERY", 1)
    num_ranks.append(tp)
    others = inspect.signature(row).parameters.keys() - given.keys()
    row(**given, **{name: request.getfixturevalue(name) for name in others})
