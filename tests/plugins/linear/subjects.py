"""Calls of linear that its tests make."""

from kit.ops import subject

SUBJECTS = [
    subject("linear", F=48, O=80),
    subject("linear", F=33, O=100, absent="bias"),
    subject("linear", F=600, O=200),
    subject("linear", F=257, O=33),
    subject("linear", F=48, O=80, option="residual"),
    subject("linear", F=257, O=33, option="residual", absent="bias"),
]
