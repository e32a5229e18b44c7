"""Recurrent ops as an engine for a GPU has them, for the host of kit/grid.py; and how far they may err."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module

import torch
from kit import grid, ops
from kit.ops import Tensors, rel_error

from hemiola.plugins import OPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (150, 97, 64, 33, 7)  # of sequences in a storm


@dataclass(frozen=True)
class Subject:
    """An op on the absolute grid as an engine for a GPU has it, its constants bound."""

    name: str
    sizes: dict[str, int]  # of its letters
    chunk_len: int
    make_tokens: Callable[[int], Tensors]  # inputs of that many tokens
    constants: Tensors
    attrs: tuple[float, ...] = ()  # behind chunk_len
    num_drafts: int = 4
    plan: tuple[int, ...] | None = None  # of tiles, on which no bit depends
    junk: float = 1.0  # finite: a tile multiplies what it leaves out by zero
    dtype: torch.dtype = torch.bfloat16  # of the engine

    def make_slots(self, num: int) -> Tensors:
        """What that many slots hold, NaN everywhere; the state first."""
        ring_len = self.chunk_len + self.num_drafts + self.sizes.get("W", 1) - 1
        sizes = self.sizes | {"S": num, "R": ring_len}
        return [
            torch.full([sizes[letter] for letter in arg.shape], torch.nan, device=DEVICE).to(
                self.dtype if torch.bfloat16 in arg.dtypes else torch.float32
            )
            for arg in OPS[self.name].args
            if arg.mutated
        ]

    def call(self, tokens: Tensors, slots: Tensors, rows: torch.Tensor) -> torch.Tensor:
        module = import_module(f"hemiola.plugins.{self.name}.cuda")
        plan = {"plan": module.TilePlan(*self.plan)} if self.plan else {}
        given = (*tokens, *self.constants, *slots, rows, self.chunk_len, *self.attrs)
        return getattr(module, self.name)(*given, **plan)

    def tokens(self, num: int, seed: int) -> Tensors:
        torch.manual_seed(seed)
        return self.make_tokens(num)

    def states(self, num: int, _chunk_len: int, _num_drafts: int) -> Tensors:
        """Rings of one size, so that a kernel is compiled once."""
        return self.make_slots(num)

    def run(
        self, _form: str, tokens: Tensors, states: Tensors, rows: list[tuple[int, ...]], _chunk_len: int
    ) -> torch.Tensor:
        return self.call(tokens, states, rows_of(*rows, device=DEVICE))

    at_edge = ops.Subject.at_edge

    def truth(self, tokens: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs, and the state at the end: the reference in fp64."""
        wide, slots = ([t.double().cpu() for t in given] for given in (tokens, self.make_slots(2)))
        rows = rows_of((0, len(wide[0]), 0, 1, 0, 0, 0, 0), device="cpu")
        constants = [constant.double().cpu() for constant in self.constants]
        y = OPS[self.name].reference(*wide, *constants, *slots, rows, self.chunk_len, *self.attrs)
        return y, slots[0][1]


def halves(num: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Columns of a wider tensor, as a layer cuts them out of a projection."""
    return torch.randn(num, width + 64, device=DEVICE).to(dtype)[:, :width]


def rows_of(*rows: Sequence[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 8)


def plain_run(subject: Subject, tokens: Tensors) -> grid.Plain:
    return grid.Plain(subject, "cuda", subject.chunk_len, tokens)


def storm(subject: Subject, lengths: Sequence[int] = LENGTHS, seed: int = 3) -> None:
    """Random steps of several sequences; raises where a bit differs from the plain runs."""
    grid.storm(subject, "cuda", subject.chunk_len, subject.num_drafts, seed, num_steps=24, lengths=lengths)


def check_late_snapshot(subject: Subject) -> None:
    """Many drafts are accepted beyond an edge; the next step takes its snapshot, and brings as many."""
    chunk_len, num_drafts = subject.chunk_len, subject.num_drafts
    host = grid.Host(subject, "cuda", chunk_len, num_drafts, num_slots=14, seed=1)
    plain = plain_run(subject, subject.tokens(3 * chunk_len + num_drafts, 1))
    sequences = [host.start(plain) for _ in range(4)]
    host.step([grid.Part(sequence, 3 * chunk_len - 2) for sequence in sequences])
    kept = (1, num_drafts // 2, num_drafts - 1, num_drafts)
    for sequence, accepted in zip(sequences, kept, strict=True):
        host.step([grid.Part(sequence, 1, num_drafts, accepted)])
        part = grid.Part(sequence, 1, num_drafts, 0, host.acquire(), 3 * chunk_len)
        host.step([part], padding=5)
        assert part.stored


def same_bits(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """Raises unless a and b are equal and hold no NaN."""
    if not torch.equal(a, b):
        wrong = ((a != b) | a.isnan()).sum().item()
        raise AssertionError(f"{what} differ in {wrong} of {a.numel()} numbers")


def check_errors(subject: Subject, outputs: float = 2.5e-3, state: float | None = None) -> None:
    torch.manual_seed(0)
    tokens = subject.make_tokens(192)
    wanted, last = subject.truth(tokens)
    run = plain_run(subject, tokens)
    assert rel_error(run.outputs, wanted) < outputs
    assert state is None or rel_error(run.at_edge(192), last) < state


def check_tiles(subject: Subject, plan: tuple[int, ...]) -> None:
    """They leave the bits alone."""
    torch.manual_seed(0)
    tokens, other = subject.make_tokens(100), replace(subject, plan=plan)
    plain, tiled = plain_run(subject, tokens), plain_run(other, tokens)
    same_bits(tiled.outputs, plain.outputs, "outputs")
    same_bits(tiled.at_edge(96), plain.at_edge(96), "state")
    storm(other, (150, 33), seed=4)


def check_last_slot(subject: Subject, numbers: int) -> None:
    """Of so many that the state of the last begins behind 2 to the 31 numbers."""
    num = 2**31 // numbers + 3
    tokens = subject.make_tokens(40)
    plain, slots = plain_run(subject, tokens), subject.make_slots(num)
    y = subject.call(tokens, slots, rows_of((0, 40, 0, num - 1, 0, 0, 0, 0), device=DEVICE))
    same_bits(y, plain.outputs, "outputs")
    same_bits(slots[0][num - 1], plain.at_edge(32), "state")
