"""Calls of delta that its tests make."""

from kit.ops import subject

SUBJECTS = [
    subject("delta", G=1, K=16, H=3, V=64, J=1),
    subject("delta", G=4, K=32, H=20, V=80, J=1),
    subject("delta", G=2, K=16, H=2, V=16, J=16),
]
AHEAD = subject("delta", G=1, K=32, H=2, V=32, J=1)
