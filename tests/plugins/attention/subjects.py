"""Calls of attention that its tests make."""

from dataclasses import replace

from kit.ops import subject

from hemiola.plugins.attention.pages import CODES
from hemiola.plugins.spec import E4M3

PAGES = {"Z": 40, "L": 16, "W": 12}
SUBJECTS = [
    subject("attention", 0.2, 0, 1.0, 1.0, H=6, D=32, G=2, **PAGES),
    subject("attention", 0.1, 1, 1.0, 1.0, H=3, D=80, G=3, **PAGES),
    replace(subject("attention", 0.1, 0, 0.25, 0.0390625, H=6, D=48, G=2, **PAGES), kept=E4M3),
    replace(subject("attention", 0.1, 0, 1.0, 1.0, H=6, D=64, G=2, A=26, B=36, **PAGES), kept=CODES),
]
AHEAD = subject("attention", 0.2, 0, 1.0, 1.0, H=4, D=64, G=2, Z=160, L=16, W=64)
