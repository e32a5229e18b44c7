"""Calls of mamba2 that its tests make."""

import math

from kit.ops import subject

SUBJECTS = [
    subject("mamba2", 0.02, 0.3, H=3, P=32, G=1, D=80),
    subject("mamba2", 0.0, math.inf, H=20, P=16, G=5, D=16),
]
AHEAD = subject("mamba2", 0.0, 1.0, H=2, P=16, G=1, D=16)
