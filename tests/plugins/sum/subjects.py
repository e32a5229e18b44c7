"""Calls of sum that its tests make."""

from kit.ops import subject

from hemiola.plugins.ranks import words_of

SUBJECTS = [subject("sum", F=48, G=words_of(1)), subject("sum", F=33, G=words_of(1))]
