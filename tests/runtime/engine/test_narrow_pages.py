"""The promise with narrow weights and pages: tokens are those of such an oracle, logits the plain run's bits.

Rows of the matrix (test_matrix.py) with chunks, windows, hits, preemption, and all at once; and the report of
text that degenerated with int4 weights and compressed pages.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.engine_hand import DEVICE, PAGE, EngineHand, Wanted, own_answer
from kit.plain import Plain

from hemiola.plugins.attention.pages import FORMATS
from tests.runtime.engine import test_engine_storms as storms
from tests.runtime.engine import test_matrix as matrix
from tests.runtime.engine import test_matrix_cache as cache
from tests.runtime.engine import test_reports as reports

NEMOTRON, QWEN = "nemotron_h_moe", "qwen3_5"
ROWS: list[tuple[Callable[..., object], dict[str, object]]] = [
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
        {"family": QWEN, "kind": "mtp", "prefix_cache": True, "depth": 1, "runs": [1]},
    ),
    (storms.a_storm, {"seed": 0}),
    (storms.a_storm, {"seed": 1}),
]


def name_of(weights: str, kv: str, row: Callable[..., object], given: dict[str, object]) -> str:
    return "-".join(filter(None, (weights, kv, row.__name__, *map(str, given.values()))))


RUNS = {"fp8": ROWS[::2], "turboquant_4bit_nc": ROWS[1::2]}  # each row over one of them
OTHERS = ROWS[4:5]  # with the other formats
GROUPS = ("qwen_fp8", "modelopt_nvfp4", "compressed_w4a16_asym", "compressed_int8")  # e4m3, e2m1, int4, int8
PAGES = ("turboquant_k8v4", "turboquant_k3v4_nc", "turboquant_3bit_nc", "fp8", "turboquant_4bit_nc", "auto")
CASES = [("", kv, *row) for kv in FORMATS if kv != "auto" for row in RUNS.get(kv, OTHERS)]
CASES += [(GROUPS[n % 4], PAGES[(n + 1) % 6], *row) for n, row in enumerate(ROWS[:4])]
REPORT = reports.test_001_text_degenerates_with_speculation_and_prefix_hits
CASES += [
    (weights, "turboquant_4bit_nc", REPORT, {"family": QWEN, "kind": "mtp", "pipeline_depth": 2})
    for weights in ("", "compressed_w4a16")
]
STORMS = [  # one for each group in CI; all meet all formats of pages in `make fuzz`
    pytest.param((GROUPS[n % 4], PAGES[n % 4 if n < 4 else n % 6]), 4 * (n // 2) + n % 2, id=f"{n}")
    for n in range(storms.SEED, storms.SEED + storms.STORMS // 6)
]
NARROW = [pytest.param(case[:2], *case[2:], id=name_of(*case)) for case in CASES]


@pytest.fixture(scope="session")
def narrow(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A recipe of kit.quantised or "", and what pages hold."""
    return request.param


def family_of(narrow: tuple[str, str], family: str) -> str:
    return "+".join(filter(None, (narrow[0], family)))


@pytest.fixture(scope="session")
def tiny_engine(tiny_engine: Callable[..., Path], narrow: tuple[str, str]) -> Callable[..., Path]:
    """Those of other tests, with such weights and pages."""
    return lambda family, **options: tiny_engine(family_of(narrow, family), kv_dtype=narrow[1], **options)


@pytest.fixture(scope="session")
def wanted(
    narrow: tuple[str, str],
    oracle_answer: Callable[..., list[int]],
    tiny_engine: Callable[..., Path],
    plain_runs: Callable[[Path], Plain],
) -> Wanted:
    """As in conftest.py, with such weights and pages."""
    if DEVICE == "cpu":
        return Wanted(
            lambda family, prompt, num: oracle_answer(family_of(narrow, family), prompt, num, narrow[1])
        )
    return Wanted(functools.partial(own_answer, tiny_engine, plain_runs))


@pytest.mark.parametrize(("narrow", "row", "given"), NARROW, indirect=["narrow"])
def test_a_row_of_the_matrix(
    request: pytest.FixtureRequest, narrow: object, row: Callable[..., object], given: dict[str, object]
) -> None:
    others = inspect.signature(row).parameters.keys() - given.keys()
    row(**given, **{name: request.getfixturevalue(name) for name in others})


@pytest.mark.parametrize(("narrow", "seed"), STORMS, indirect=["narrow"])
def test_a_storm(engine_hands: Callable[..., EngineHand], wanted: Wanted, narrow: object, seed: int) -> None:
    """Of the families that are quantised: seeds of storms that are 0 or 1 modulo 4."""
    print(narrow)
    storms.a_storm(engine_hands, wanted, seed)
