"""Property tests look at no clock; a run that judges a change repeats its examples, others say how to."""

import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=1)
@given(st.none())
def test_a_slow_example_is_no_failure(nothing: None) -> None:
    time.sleep(0.3)


def drawn(profile: str) -> list[int]:
    numbers = []

    @settings(settings.get_profile(profile))
    @given(st.integers())
    def draw(number: int) -> None:
        numbers.append(number)

    draw()
    return numbers


def test_a_change_is_not_judged_by_luck_and_other_runs_try_others(pytestconfig: pytest.Config) -> None:
    usual = "fixed" if os.environ.get("CI") else "others"
    assert settings.default == settings.get_profile(pytestconfig.getoption("hypothesis_profile") or usual)
    assert pytestconfig.getoption("hypothesis_seed") is not None and settings.default.print_blob
    assert drawn("fixed") == drawn("fixed") != drawn("others")
    assert len(drawn("fuzz")) > 10 * len(drawn("others"))
