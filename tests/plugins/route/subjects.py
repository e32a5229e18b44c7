"""Calls of route that its tests make."""

from kit.ops import subject

SUBJECTS = [
    subject("route", "softmax", 4, 1, 1, True, 1.0, E=37, absent="bias"),
    subject("route", "softmax", 3, 1, 1, False, 1.5, E=64),
    subject("route", "sigmoid", 5, 4, 2, True, 2.5, E=60),
    subject("route", "sigmoid", 2, 1, 1, False, 1.0, E=16, absent="bias"),
]
AHEAD = subject("route", "sigmoid", 3, 1, 1, True, 1.0, E=8)
