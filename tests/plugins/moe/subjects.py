"""Calls of moe that its tests make."""

from kit.ops import subject

SUBJECTS = [
    subject("moe", "swiglu", F=32, K=3, E=7, J=96, I=48),
    subject("moe", "relu2", F=64, K=2, E=5, J=16, I=16),
]
AHEAD = subject("moe", "swiglu", E=6, K=2, F=32, J=64, I=32)
