"""A small host for kernels with state: sequences cut into random steps, beside their plain runs."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module

import torch

from hemiola.plugins import OPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (150, 97, 64, 33, 7)  # of sequences in a storm
Tensors = list[torch.Tensor]


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

    @property
    def same_slots(self) -> bool:
        """The first tensor of a slot is a function of its tokens; else only outputs tell."""
        return self.name != "conv"

    def make_slots(self, num: int) -> Tensors:
        """What that many slots hold, NaN everywhere; the state first."""
        ring_len = self.chunk_len + self.num_drafts + self.sizes.get("W", 1) - 1
        sizes = self.sizes | {"S": num, "R": ring_len}
        return [
            torch.full([sizes[letter] for letter in arg.shape], torch.nan, device=DEVICE).to(
                torch.bfloat16 if torch.bfloat16 in arg.dtypes else torch.float32
            )
            for arg in OPS[self.name].args
            if arg.mutated
        ]

    def call(self, tokens: Tensors, slots: Tensors, rows: torch.Tensor) -> torch.Tensor:
        module = import_module(f"hemiola.plugins.{self.name}.cuda")
        plan = {"plan": module.TilePlan(*self.plan)} if self.plan else {}
        given = (*tokens, *self.constants, *slots, rows, self.chunk_len, *self.attrs)
        return getattr(module, self.name)(*given, **plan)

    def truth(self, tokens: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs, and the state at the end: the reference in fp64."""
        wide, slots = ([t.double().cpu() for t in given] for given in (tokens, self.make_slots(2)))
        rows = rows_of((0, len(wide[0]), 0, 1, 0, 0, 0, 0), device="cpu")
        constants = [constant.double().cpu() for constant in self.constants]
        y = OPS[self.name].reference(*wide, *constants, *slots, rows, self.chunk_len, *self.attrs)
        return y, slots[0][1]


def halves(num: int, width: int) -> torch.Tensor:
    """Columns of a wider tensor, as a layer cuts them out of a projection."""
    return torch.randn(num, width + 64, device=DEVICE).bfloat16()[:, :width]


@dataclass(eq=False)
class Journey:
    """One sequence on its way: what it is made of and how far it came."""

    tokens: Tensors
    slot: int
    committed: int = 0
    edge: int = 0
    outputs: Tensors = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.tokens[0].shape[0]


@dataclass(frozen=True)
class Plain:
    """One sequence alone, in one call: its outputs, and the state at every edge from calls that end there."""

    outputs: torch.Tensor
    states: dict[int, torch.Tensor]


def rows_of(*rows: Sequence[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device).view(-1, 8)


def plain_run(subject: Subject, tokens: Tensors) -> Plain:
    device, length, chunk_len = tokens[0].device, tokens[0].shape[0], subject.chunk_len
    outputs = subject.call(
        tokens, subject.make_slots(2), rows_of((0, length, 0, 1, 0, 0, 0, 0), device=device)
    )
    states = {}
    for edge in range(chunk_len, length + 1, chunk_len):
        slots = subject.make_slots(2)
        subject.call([t[:edge] for t in tokens], slots, rows_of((0, edge, 0, 1, 0, 0, 0, 0), device=device))
        states[edge] = slots[0][1].clone()
    return Plain(outputs, states)


def storm(subject: Subject, lengths: Sequence[int] = LENGTHS, seed: int = 3, longest: int = 90) -> int:
    """Random steps of several sequences; raises where a bit differs from the plain runs; how many steps."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sequences = []
    slot_ids = rng.sample(range(1, 2 * len(lengths) + 1), len(lengths))
    for slot, length in zip(slot_ids, lengths, strict=True):
        sequences.append(Journey(subject.make_tokens(length), slot))
    plains = [plain_run(subject, sequence.tokens) for sequence in sequences]
    num_slots = 2 * len(lengths) + 2
    slots, num_steps = subject.make_slots(num_slots), 0
    while any(s.committed < s.length for s in sequences):
        _step(subject, sequences, plains, slots, rng, num_slots - 1, longest)
        num_steps += 1
    for sequence, plain in zip(sequences, plains, strict=True):
        same_bits(torch.cat(sequence.outputs), plain.outputs, f"{subject.name} seed {seed}: outputs")
    return num_steps


def _step(
    subject: Subject,
    sequences: list[Journey],
    plains: list[Plain],
    slots: Tensors,
    rng: random.Random,
    snapshot_slot: int,
    longest: int,
) -> None:
    """One call with some of the sequences, drafts, padding rows, empty rows and tokens of nobody."""
    device, chunk_len = slots[0].device, subject.chunk_len
    chosen = [s for s in sequences if s.committed < s.length and rng.random() < 0.8]
    rng.shuffle(chosen)
    parts, rows, plan, first, dead = [], [], [], 0, []
    snapshot_by = rng.choice(chosen) if chosen else None
    for sequence in chosen:
        if rng.random() < 0.2:
            gap = rng.randint(0, 5)
            slot = 0 if rng.random() < 0.7 else sequence.slot
            rows.append((first, gap if slot == 0 else 0, 0, slot, rng.randint(0, 9), 0, 0, 0))
            parts.append(subject.make_tokens(gap))
            dead += range(first, first + gap)
            first += gap
        left = sequence.length - sequence.committed
        certain = min(left, rng.choice((1, 1, 1, rng.randint(1, longest))))
        drafts = rng.randint(0, subject.num_drafts) if certain == 1 else 0
        accepted = min(rng.randint(0, drafts), left - certain)
        good, at = certain + accepted, sequence.committed
        parts.append([t[at : at + good] for t in sequence.tokens])
        parts.append(subject.make_tokens(drafts - accepted))
        num, new_edge = certain + drafts, (at + certain) // chunk_len * chunk_len
        snapshot = (0, 0)
        if sequence is snapshot_by and new_edge > sequence.edge:
            snapshot = (snapshot_slot, rng.randrange(sequence.edge + chunk_len, new_edge + 1, chunk_len))
        rows.append((first, num, drafts, sequence.slot, at, sequence.edge, *snapshot))
        plan.append((sequence, first, good, new_edge, snapshot[1]))
        first += num
    if first == 0:
        return
    tail = rng.randint(0, 20)
    parts.append(subject.make_tokens(tail))
    dead += range(first, first + tail)
    tokens = [torch.cat([part[i] for part in parts]) for i in range(len(parts[0]))]
    slots[0][snapshot_slot] = float("nan")
    y = subject.call(tokens, slots, rows_of(*rows, device=device))
    assert (y[dead] == 0).all(), "tokens of no live row are not zero"
    for sequence, start, good, new_edge, shot in plan:
        sequence.outputs.append(y[start : start + good])
        sequence.committed, sequence.edge = sequence.committed + good, new_edge
        plain = plains[sequences.index(sequence)]
        if new_edge and subject.same_slots:
            same_bits(slots[0][sequence.slot], plain.states[new_edge], f"{subject.name}: state at {new_edge}")
        if shot and subject.same_slots:
            same_bits(slots[0][snapshot_slot], plain.states[shot], f"{subject.name}: snapshot at {shot}")


def same_bits(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    """Raises unless a and b are equal and hold no NaN."""
    if not torch.equal(a, b):
        wrong = ((a != b) | a.isnan()).sum().item()
        raise AssertionError(f"{what} differ in {wrong} of {a.numel()} numbers")


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative error in norm."""
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / b.norm()).item()


def check_errors(subject: Subject, outputs: float = 2.5e-3, state: float | None = None) -> None:
    torch.manual_seed(0)
    tokens = subject.make_tokens(192)
    wanted, last = subject.truth(tokens)
    run = plain_run(subject, tokens)
    assert error(run.outputs, wanted) < outputs
    assert state is None or error(run.states[192], last) < state


def check_tiles(subject: Subject, plan: tuple[int, ...]) -> None:
    """They leave the bits alone."""
    torch.manual_seed(0)
    tokens, other = subject.make_tokens(100), replace(subject, plan=plan)
    plain, tiled = plain_run(subject, tokens), plain_run(other, tokens)
    same_bits(tiled.outputs, plain.outputs, "outputs")
    same_bits(tiled.states[96], plain.states[96], "state")
    storm(other, (150, 33), seed=4, longest=20)


def check_last_slot(subject: Subject, numbers: int) -> None:
    """Of so many that the state of the last begins behind 2 to the 31 numbers."""
    num = 2**31 // numbers + 3
    tokens = subject.make_tokens(40)
    plain, slots = plain_run(subject, tokens), subject.make_slots(num)
    y = subject.call(tokens, slots, rows_of((0, 40, 0, num - 1, 0, 0, 0, 0), device=DEVICE))
    same_bits(y, plain.outputs, "outputs")
    same_bits(slots[0][num - 1], plain.states[32], "state")
