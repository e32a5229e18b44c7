"""What launchers refuse (plugins/gpu/checks.py)."""

from threading import Event, Thread

import pytest
import torch

from hemiola.plugins.gpu.checks import check, spared


def refused() -> bool:
    try:
        check("op", "x", torch.zeros(3), [4], torch.float32, torch.device("cpu"))
    except ValueError:
        return True
    return False


def test_steps_of_two_engines_that_overlap_end_all_checks() -> None:
    begun, first_ended = Event(), Event()

    def step() -> None:
        with spared():
            begun.set()
            first_ended.wait(60)

    with spared():
        other = Thread(target=step)
        other.start()
        assert begun.wait(60) and not refused()
    first_ended.set()
    other.join(60)
    assert refused()


def test_what_is_raised_leaves_no_check_out() -> None:
    with pytest.raises(KeyError), spared():
        raise KeyError
    assert refused()
