"""Calls of gate that its tests make."""

from kit.ops import subject

SUBJECTS = [
    subject("gate", "silu", E=48, J=48),
    subject("gate", "sigmoid", E=48, J=48),
    subject("gate", "sigmoid", E=16, J=1),
    subject("gate", "silu", E=32, J=1),
]
