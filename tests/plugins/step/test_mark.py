"""Times that a step leaves."""

import pytest
import torch

from hemiola.plugins.step import forms


@pytest.mark.parametrize("form", ["reference", "compiled"])
def test_marks_rise(form: str) -> None:
    times = torch.zeros(3, dtype=torch.int64)
    for place in range(3):
        forms(form).mark(times, place)
    assert 0 < times[0] <= times[1] <= times[2]
