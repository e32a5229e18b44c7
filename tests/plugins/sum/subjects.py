"""Calls of sum that its tests make."""

from kit.ops import subject

from hemiola.plugins.ranks import WORDS

SUBJECTS = [subject("sum", F=48, G=WORDS), subject("sum", F=33, G=WORDS)]
