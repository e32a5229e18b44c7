"""The best token of each line of logits: torch's own kernels, an argmax and a gather."""

from hemiola.plugins.step.best.reference import best

__all__ = ["best"]
