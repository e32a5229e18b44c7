"""Calls of conv that its tests make."""

from kit.ops import subject

SUBJECTS = [subject("conv", E=48, W=4), subject("conv", E=16, W=2)]
AHEAD = subject("conv", E=48, W=4)
