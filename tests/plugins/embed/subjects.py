"""Calls of embed that its tests make."""

from kit.ops import subject

SUBJECTS = [subject("embed", V=100, F=40), subject("embed", V=33, F=7)]
