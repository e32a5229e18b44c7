"""What a call is refused with, as data. Tables of tests have it as (call, code, field)."""

from collections.abc import Callable

import pytest

from hemiola.runtime.errors import CODES, Refused


def refused(call: Callable[[], object]) -> Refused:
    """The error, which has a code and is a sentence of one line."""
    with pytest.raises(Refused) as caught:
        call()
    error = caught.value
    assert error.code in CODES and error.code != "other", str(error)
    assert "\n" not in str(error) and len(str(error)) < 1000, str(error)
    return error


def code_and_field(call: Callable[[], object]) -> tuple[str, str]:
    error = refused(call)
    return error.code, error.field
