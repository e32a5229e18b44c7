"""Counters of programs that have read what others overwrite."""

import torch


def tickets_of(state: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """By slot, and by group of it, zero between launches; they live as long as the layer's state: its first
    call must come before a graph's capture."""
    if "tickets" not in vars(state):
        vars(state)["tickets"] = torch.zeros(state.shape[0] * groups, dtype=torch.int32, device=state.device)
    return vars(state)["tickets"]
