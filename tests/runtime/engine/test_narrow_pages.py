"""The promise with pages of e4m3: tokens are those of an oracle with such pages, logits the plain run's bits.

Rows of the matrix (test_matrix.py) with chunks, windows, hits, preemption, and all at once.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.engine_hand import DEVICE, PAGE, Wanted, own_answer
from kit.plain import Plain
from oracle import Oracle

from hemiola.plugins.spec import E4M3
from tests.runtime.engine import test_engine_storms as storms
from tests.runtime.engine import test_matrix as matrix
from tests.runtime.engine import test_matrix_cache as cache

NEMOTRON, QWEN = "nemotron_h_moe", "qwen3_5"
ROWS: list[tuple[Callable[..., None], dict[str, object]]] = [
    (
        matrix.test_m07_chunks_of_any_size_beside_windows_in_any_order,
        {"family": NEMOTRON, "kind": "mtp", "chunk": PAGE + 1},
    ),
    (matrix.test_m12_drafts_of_every_quality, {"family": QWEN}),
    (matrix.test_m14_any_split_gives_one_state, {"family": QWEN}),
    (cache.test_m05_a_page_edge_inside_a_window, {"family": NEMOTRON, "kind": "scripted", "depth": 2}),
    (cache.test_m06_siblings_behind_one_system_prompt, {"family": NEMOTRON, "depth": 1, "staggered": True}),
    (
        cache.test_m08_preemption_at_every_step,
        {"family": QWEN, "kind": "mtp", "prefix_cache": True, "depth": 1},
    ),
    (storms.test_a_storm, {"seed": 0}),
    (storms.test_a_storm, {"seed": 1}),
]


@pytest.fixture(scope="session")
def tiny_engine(tiny_engine: Callable[..., Path]) -> Callable[..., Path]:
    """Those of other tests, with such pages."""
    return functools.partial(tiny_engine, kv_dtype="fp8")


@pytest.fixture(scope="session")
def wanted(
    tiny_checkpoint: Callable[[str], Path],
    tiny_engine: Callable[..., Path],
    plain_runs: Callable[[Path], Plain],
) -> Wanted:
    """As in conftest.py, with such pages."""
    oracle = functools.cache(lambda family: Oracle(tiny_checkpoint(family), kv_dtype=E4M3))
    if DEVICE == "cpu":
        return Wanted(lambda family, prompt, num: oracle(family).generate(prompt, num).token_ids)
    return Wanted(functools.partial(own_answer, tiny_engine, plain_runs))


@pytest.mark.parametrize(("row", "given"), ROWS, ids=lambda value: getattr(value, "__name__", None))
def test_a_row_of_the_matrix(
    request: pytest.FixtureRequest, row: Callable[..., None], given: dict[str, object]
) -> None:
    others = inspect.signature(row).parameters.keys() - given.keys()
    row(**given, **{name: request.getfixturevalue(name) for name in others})
