"""What users are told of tokens: torch's own kernels, which a graph captures."""

from hemiola.plugins.step.logprobs.reference import logprobs

__all__ = ["logprobs"]
