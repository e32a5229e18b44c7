"""What scripts/hostile.py makes of its phases; the phases themselves need a server."""

import importlib
import json
import statistics
from pathlib import Path
from types import ModuleType

import pytest

from hemiola.runtime.serving.ask import ALIASES, FIXED, KEYS, LISTS, read_ask
from hemiola.runtime.serving.generate_body import check_generate
from hemiola.runtime.serving.openai.responses import ResponsesRequest
from hemiola.runtime.serving.openai.schema import ChatRequest, CompletionRequest, parse

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


def test_a_field_that_is_new_has_no_dear_request(hostile: ModuleType) -> None:
    """Every field of every door stands in the table, or among those of which no value is dearer."""
    known = {*set(KEYS) - set(ALIASES) - set(FIXED)}
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest):
        known |= set(kind.model_fields)
    table = {name.partition(",")[0] for name in hostile.dearest(4096)}
    assert not table & hostile.NO_DEARER.keys()
    assert table | hostile.NO_DEARER.keys() == known


def test_a_dear_request_is_refused(hostile: ModuleType) -> None:
    """As far as it can be said without an engine; what is refused, is so for its length alone."""
    kinds = {"completions": CompletionRequest, "chat/completions": ChatRequest, "responses": ResponsesRequest}
    for name, own in hostile.dearest(4096).items():
        for body in (own.plain, own.dear):
            text = json.dumps(body).encode()
            if own.route:
                request = parse(kinds[own.route], text)
                made = request.chat() if own.route == "responses" else request
                made.params(16, None)
            else:
                check_generate(text)
                asked = {key: [v] if key in LISTS and isinstance(v, str) else v for key, v in body.items()}
                assert "cancel" in asked or read_ask(asked), name
