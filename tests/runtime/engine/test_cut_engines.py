"""The promise on engines that were cut, whose parts may round by what runs beside: tokens are the oracle's.

Rows of the matrix (test_matrix.py), on the families with heads. Logits, states and pages are near the plain
run's instead of its bits: onnxruntime's products depend on the number of rows.
"""

import inspect
from collections.abc import Callable

import pytest
import torch
from kit.engine_hand import CHUNK, NUM_DRAFTS, PAGE, SMALL, EngineHand, Wanted
from kit.harness import Harness

from tests.runtime.engine import test_engine_storms as storms
from tests.runtime.engine import test_matrix as matrix
from tests.runtime.engine import test_matrix_cache as cache
from tests.runtime.engine import test_matrix_pairs as pairs

TARGET = {"target": "onnxruntime"}
MTP = {"kind": "mtp", "num_drafts": NUM_DRAFTS}
NEMOTRON, QWEN = "nemotron_h_moe", "qwen3_5"
BOTH = (NEMOTRON, QWEN)
ROWS: list[tuple[Callable[..., None], tuple[str, ...], dict[str, object]]] = [
    (matrix.test_m01_prompts_of_every_length, (QWEN,), {"kind": "mtp"}),
    (matrix.test_m02_every_three_accepted_counts_in_a_row, BOTH, {}),
    (
        matrix.test_m07_chunks_of_any_size_beside_windows_in_any_order,
        (NEMOTRON,),
        {"kind": "mtp", "chunk": PAGE + 1},
    ),
    (matrix.test_m09_ends_at_every_index_of_a_window, (QWEN,), {"depth": 1}),
    (matrix.test_m10_batches_of_every_size, (NEMOTRON,), {"num_drafts": NUM_DRAFTS}),
    (matrix.test_m11_up_to_max_len, (QWEN,), {"kind": "ngram"}),
    (matrix.test_m12_drafts_of_every_quality, BOTH, {}),
    (matrix.test_m16_a_seeded_sample_does_not_depend_on_drafts_hits_or_preemption, (NEMOTRON,), {}),
    (matrix.test_m17_penalties_biases_and_bad_words_see_accepted_drafts, (QWEN,), {}),
    (cache.test_m04_a_prompt_again_and_longer_and_with_another_token_anywhere, (NEMOTRON,), MTP),
    (cache.test_m05_a_page_edge_inside_a_window, (NEMOTRON,), {"kind": "scripted", "depth": 2}),
    (cache.test_m05_two_page_edges_inside_a_window, (QWEN,), {"kind": "scripted"}),
    (cache.test_m06_siblings_behind_one_system_prompt, (NEMOTRON,), {"depth": 1, "staggered": True}),
    (
        cache.test_m08_preemption_at_every_step,
        (QWEN,),
        {"kind": "mtp", "prefix_cache": True, "depth": 1, "runs": [2]},
    ),
    (cache.test_m18_a_conversation, BOTH, {}),
]
CASES = [
    pytest.param(row, {"family": family} | values, id=f"{row.__name__}-{family}")
    for row, families, values in ROWS
    for family in families
]


@pytest.fixture
def engine_hands(engine_hands: Callable[..., EngineHand]) -> Callable[..., EngineHand]:
    """Those of other tests, for this target."""

    def make(family: str, kind: str = "plain", built: dict | None = None, **options: object) -> EngineHand:
        return engine_hands(family, kind, (built or {}) | TARGET, **options)

    return make


@pytest.mark.parametrize(("row", "given"), CASES)
def test_a_row_of_the_matrix(
    request: pytest.FixtureRequest, row: Callable[..., None], given: dict[str, object]
) -> None:
    others = inspect.signature(row).parameters.keys() - given.keys()
    row(**given, **{name: request.getfixturevalue(name) for name in others})


@pytest.mark.parametrize("family", BOTH)
def test_m14_any_split_gives_nearly_the_same_logits(
    tiny_engine: Callable, wanted: Wanted, family: str
) -> None:
    text = wanted.story(family)[: 5 * PAGE + 3]
    engine = Harness(tiny_engine(family, **SMALL, **TARGET, max_step_tokens=512))
    whole = engine.run(text)
    for cuts in ([1] * (len(text) - 1), [CHUNK, PAGE, PAGE - 1, 1, 4]):
        engine.forget()
        torch.testing.assert_close(engine.run(text, *cuts), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in pairs.CASES if case["family"] in BOTH], ids=pairs.name_of)
def test_a_pair_of_everything(engine_hands: Callable, wanted: Wanted, case: pairs.Case) -> None:
    pairs.test_a_pair_of_everything(engine_hands, wanted, case)


@pytest.mark.parametrize("seed", [0, 1, 4, 5])
def test_a_storm(engine_hands: Callable, wanted: Wanted, seed: int) -> None:
    storms.a_storm(engine_hands, wanted, seed)
