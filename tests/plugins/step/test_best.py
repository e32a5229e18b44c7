"""The best token of a line of logits, wherever it stands."""

import pytest
import torch

from hemiola.plugins.step import forms

INF, NAN = float("inf"), float("nan")
LINES = {
    "the first of equals": ([1.0, 3.0, 3.0, 2.0], 1, False),
    "the first NaN": ([1.0, NAN, 9.0, NAN], 1, True),
    "infinity": ([1.0, INF, 9.0, INF], 1, True),
    "NaN behind infinity": ([1.0, INF, NAN, 2.0], 2, True),
    "minus infinity is no best": ([-INF, -INF, -9.0, -INF], 2, False),
    "nothing": ([-INF, -INF, -INF, -INF], 0, True),
    "zeros of both signs": ([-1.0, -0.0, 0.0, -2.0], 1, False),
}


@pytest.mark.parametrize("case", LINES)
@pytest.mark.parametrize("padding", [0, 12, 16, 50])
def test_the_best_token_of_a_line(case: str, padding: int) -> None:
    values, token, broken = LINES[case]
    for before in (0, padding):
        line = [-100.0] * before + values + [-100.0] * (padding - before)
        if case == "nothing":
            line = [-INF] * len(line)
        for form in ("reference", "compiled"):
            logit, chosen = forms(form).best(torch.tensor([line, line]))
            assert chosen.tolist() == torch.tensor([line, line]).argmax(1).tolist()
            assert logit.isfinite().tolist() == [not broken] * 2
            assert case == "nothing" or chosen[0] == token + before
