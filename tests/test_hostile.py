"""What scripts/hostile.py makes of its phases; the phases themselves need a server."""

import importlib
import statistics
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("hostile")


def test_load_that_comes_and_goes_strikes_both_sides_of_a_pair(hostile: ModuleType) -> None:
    """A field that costs 1.5 times the time costs that, while the machine becomes five times as slow."""
    bodies, phases = ({"dear": 0}, {"dear": 1}), []

    def measured(body: dict) -> float:
        phases.append(body["dear"])
        return (1.5 if body["dear"] else 1.0) * (1 + len(phases) // 2)

    pairs = hostile.pairs_of(measured, *bodies, rounds=6)
    assert phases == [0, 1, 1, 0] * 3 and len(pairs) == 6
    found = hostile.compared(pairs)
    assert found.lowest <= found.ratio <= found.highest
    assert found.ratio == pytest.approx(1.5, rel=0.1)
    assert found.plain == statistics.median(calm for calm, _ in pairs)
