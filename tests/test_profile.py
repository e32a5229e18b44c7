"""Property tests look at no clock, try other examples in every run, and say how to repeat them."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=1)
@given(st.none())
def test_a_slow_example_is_no_failure(nothing: None) -> None:
    time.sleep(0.3)


def test_every_run_has_a_seed_of_its_own_and_says_it(pytestconfig: pytest.Config) -> None:
    assert not settings.default.derandomize and settings.default.print_blob
    assert pytestconfig.getoption("hypothesis_seed") is not None
