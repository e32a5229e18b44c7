"""Kernels with states, by Triton's interpreter: two steps of two rows against the reference.

The other ops' test_triton.py run interpreted as they are; what is said here of bits only a GPU can say.
"""

import os
from importlib import import_module
from typing import Any

import pytest
import torch
from kit.ops import Subject, int32, rel_error, row, subject

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

CHUNK = 16
SUBJECTS = [
    subject("attention", 0.2, 0, H=4, D=32, G=2, Z=40, L=16, W=4),
    subject("attention", 0.2, 1, H=3, D=16, G=3, Z=40, L=16, W=4),
    subject("conv", E=48, W=4),
    subject("delta", G=1, K=16, H=2, V=32, J=1),
    subject("delta", G=1, K=16, H=1, V=16, J=16),
    subject("mamba2", 0.0, 1.0, H=2, P=16, G=1, D=16),
]
# of 20 tokens: a prompt beyond an edge and one token; then the prompt's next 14 beyond another, one a draft
FIRST = [row(num_tokens=19), row(first=19, num_tokens=1, slot=2)]
SECOND = [
    row(num_tokens=14, num_drafts=1, committed=19, edge=CHUNK),
    row(first=14, num_tokens=3, slot=2, committed=1),
]
STEPS = [(20, FIRST, [*range(19), 0]), (20, SECOND, [*range(19, 33), 1, 2, 3, 0, 0, 0])]


def arguments(subject: Subject, step: int, states: list[torch.Tensor]) -> list[Any]:
    """As an engine for a GPU has them; three tokens of the second step are nobody's."""
    num_tokens, rows, positions = STEPS[step]
    given = subject.arguments(num_tokens, seed=step)
    page_table = subject.make("page_table", 0, 0) if subject.name == "attention" else None
    for index, arg in enumerate(subject.op.args):
        if arg.mutated:
            given[index] = states.pop(0) if states else given[index]
        elif arg.name == "rows":
            given[index] = int32(*rows)
        elif arg.name == "positions":
            given[index] = int32(*positions)
        elif arg.name == "page_table":
            given[index] = page_table
        if given[index].is_floating_point() and torch.bfloat16 in arg.dtypes:
            given[index] = given[index].bfloat16()
    return given


def states_of(subject: Subject, given: list[Any]) -> list[torch.Tensor]:
    return [value for arg, value in zip(subject.op.args, given, strict=False) if arg.mutated]


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_it_is_the_reference(subject: Subject) -> None:
    launcher = getattr(import_module(f"hemiola.plugins.{subject.name}.cuda"), subject.name)
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    for step in range(len(STEPS)):
        mine = arguments(subject, step, ours)
        y = launcher(*mine)
        ours = states_of(subject, mine)
        exact = arguments(subject, step, [state.clone() for state in theirs])
        exact = [v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in exact]
        wanted = subject.op.reference(*exact)
        theirs = states_of(subject, exact)
        assert y.shape == wanted.shape and not y.isnan().any()
        assert rel_error(y, wanted) < 1e-2, f"step {step}"
    for mine, wanted in zip(ours, theirs, strict=True):
        there = ~wanted.isnan()
        assert there.any() and rel_error(mine[there], wanted[there]) < 1e-2
