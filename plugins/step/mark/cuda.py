"""When a step on a GPU came to a place: inside a graph no event can be asked for its time."""

import torch

from hemiola.plugins.gpu.clock.cuda import write_time


def mark(times: torch.Tensor, place: int) -> None:
    """See reference.py."""
    write_time(times, place)
