"""The token of each line that draws: torch's own kernels, which a graph captures."""

from hemiola.plugins.step.draw.reference import draw

__all__ = ["draw"]
