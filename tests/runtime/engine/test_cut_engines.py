"""The promise on engines that were cut, whose parts may round by what runs beside: tokens are the oracle's.

Logits are not the plain run's, bit for bit: onnxruntime's depend on the number of rows.
"""

from collections.abc import Callable

import pytest
from kit.engine_hand import SMALL, Wanted

CUT = SMALL | {"target": "onnxruntime"}


@pytest.mark.parametrize("kind", ["plain", "ngram", "mtp", "scripted"])
@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_5"])
def test_drafts_hits_chunks_and_neighbours_leave_the_tokens_of_the_oracle(
    engine_hands: Callable, wanted: Wanted, family: str, kind: str
) -> None:
    hand = engine_hands(family, kind, CUT, max_rows=3, max_step_tokens=64, pipeline_depth=1)
    text = wanted.story(family)
    ids = {}
    for n in (100, 7, 100, 37, 130, 68):
        ids[hand.submit(text[:n], max_tokens=30)] = n
        hand.turn()
    hand.run()
    for request_id, n in ids.items():
        hand.check(request_id, text[n : n + 30])
    assert sum(hand.last(request_id).metrics.cached_tokens for request_id in ids) >= 100
    if kind == "scripted":
        assert sum(sum(hand.last(request_id).metrics.accepted) for request_id in ids) > 20
