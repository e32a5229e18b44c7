"""Calls of norm that its tests make."""

from kit.ops import subject

SUBJECTS = [
    subject("norm", 1e-5, 48, True, W=96),
    subject("norm", 1e-6, 16, False, W=16),
    subject("norm", 1e-6, 64, False, W=64, absent="gate"),
]
