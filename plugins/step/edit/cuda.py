"""What changes logits before a token is chosen: torch's own kernels, which a graph captures."""

from hemiola.plugins.step.edit.reference import edit

__all__ = ["edit"]
