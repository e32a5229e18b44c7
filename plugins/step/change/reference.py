"""The truth: one entry after the other."""

import torch


def change(changes: torch.Tensor, table: torch.Tensor) -> None:
    """changes [E, 2]: places in the flat table, and pages. Place 0, of slot 0, has page 0."""
    for place, page in changes.tolist():
        table.view(-1)[place] = page
