"""Calls of rope that its tests make."""

from kit.ops import subject

SUBJECTS = [
    subject("rope", H=3, D=48, M=50, R=20),
    subject("rope", H=2, D=32, M=50, R=16),
    subject("rope", H=1, D=7, M=50, R=2),
]
