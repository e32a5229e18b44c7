"""A small host for the recurrent ops: sequences in slots, random ragged steps, plain runs to compare with."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

import hemiola.plugins  # noqa: F401  registers torch.ops.hemiola
from hemiola.plugins import jit
from hemiola.plugins.conv.spec import CONV
from hemiola.plugins.delta.spec import DELTA
from hemiola.plugins.mamba2.spec import MAMBA2
from hemiola.plugins.spec import Op, next_edge

Tensors = list[torch.Tensor]
Form = Callable[..., torch.Tensor]


def form(op: Op, name: str) -> Form:
    """reference; torch and compiled: these and no fall-back; cpu: what torch.ops makes of a call."""
    match name:
        case "reference":
            return op.reference
        case "torch":
            return op.in_torch
        case "compiled":
            return getattr(import_module(f"hemiola.plugins.{op.name}.compiled"), op.name)
        case "cpu":
            return getattr(torch.ops.hemiola, op.name)
        case _:
            raise KeyError(name)


needs_numba = pytest.mark.skipif(not jit.AVAILABLE, reason="numba is not installed")
COMPILED = pytest.param("compiled", marks=needs_numba)


@dataclass(frozen=True)
class Subject:
    """An op with sizes; `sizes` maps the letters of its declaration."""

    op: Op
    sizes: tuple[tuple[str, int], ...]
    decay: float = 0.3  # log decays lie between this and 0

    def __str__(self) -> str:
        return self.op.name + "".join(f"-{letter}{size}" for letter, size in self.sizes)

    def form(self, name: str) -> Form:
        return form(self.op, name)

    def shape(self, arg: str, **more: int) -> list[int]:
        sizes = dict(self.sizes) | more
        letters = next(a.shape for a in self.op.args if a.name == arg)
        return [sizes[letter] for letter in letters]

    def tokens(self, num: int, seed: int) -> Tensors:
        """Everything that comes per token."""
        rng = torch.Generator().manual_seed(seed)
        made: dict[str, torch.Tensor] = {}
        for arg in self.op.args:
            if arg.shape[0] == "T":
                made[arg.name] = torch.randn(self.shape(arg.name, T=num), generator=rng)
        for name, value in made.items():
            if name in ("dt", "g"):
                made[name] = value.sigmoid() * (self.decay if name == "dt" else -self.decay)
            if name == "beta":
                made[name] = value.sigmoid()
            if self.op is DELTA and name in "qk":
                made[name] = F.normalize(value, dim=-1)
        return list(made.values())

    def constants(self) -> Tensors:
        """Everything else that is not a state."""
        rng = torch.Generator().manual_seed(99)
        names = {"mamba2": ("A", "D"), "conv": ("weight", "bias"), "delta": ()}[self.op.name]
        made = [torch.randn(self.shape(name), generator=rng) for name in names]
        return [-value.abs() - 0.1 if name == "A" else value for name, value in zip(names, made, strict=True)]

    def states(
        self, num_slots: int, chunk_len: int, num_drafts: int, dtype: torch.dtype = torch.float32
    ) -> Tensors:
        """Slots full of NaN."""
        ring_len = chunk_len + num_drafts + (dict(self.sizes)["W"] - 1 if self.op is CONV else 0)
        shapes = [self.shape(a.name, S=num_slots, R=ring_len) for a in self.op.args if a.mutated]
        return [torch.full(shape, float("nan"), dtype=dtype) for shape in shapes]

    def at_edge(self, states: Tensors, slot: int, edge: int) -> torch.Tensor:
        """What a slot holds of an edge: the state, or the raw columns before it."""
        if self.op is not CONV:
            return states[0][slot].clone()
        before = range(max(edge - dict(self.sizes)["W"] + 1, 0), edge)
        return states[0][slot][[place % states[0].shape[1] for place in before]].clone()


def subject(op: Op, decay: float = 0.3, **sizes: int) -> Subject:
    return Subject(op, tuple(sizes.items()), decay)


MAMBA = subject(MAMBA2, H=4, P=8, G=2, D=16)
MAMBA_ODD = subject(MAMBA2, H=3, P=5, G=1, D=6)
GDN = subject(DELTA, G=2, K=16, H=4, V=8, J=1)
GDN_ODD = subject(DELTA, G=1, K=6, H=3, V=5, J=1)
KDA = subject(DELTA, G=2, K=16, H=2, V=8, J=16)
KDA_GROUPED = subject(DELTA, G=1, K=6, H=3, V=5, J=6, decay=20.0)
CONV4 = subject(CONV, E=12, W=4)
CONV_ODD = subject(CONV, E=7, W=3)
SMALL = (MAMBA, MAMBA_ODD, GDN, GDN_ODD, KDA, KDA_GROUPED, CONV4, CONV_ODD)
# Multiples of 16, as compiled kernels want them: 16 columns go through registers alone, 64 in fours.
MAMBA_16 = subject(MAMBA2, H=4, P=16, G=2, D=16)
MAMBA_80 = subject(MAMBA2, H=2, P=32, G=1, D=80)  # 64 in fours, 16 alone
GDN_16 = subject(DELTA, G=2, K=16, H=4, V=16, J=1)
GDN_64 = subject(DELTA, G=1, K=16, H=2, V=64, J=1)
GDN_80 = subject(DELTA, G=1, K=32, H=1, V=80, J=1)
KDA_16 = subject(DELTA, G=2, K=16, H=2, V=16, J=16)
KDA_128 = subject(DELTA, G=1, K=32, H=3, V=128, J=32, decay=20.0)
CONV_16 = subject(CONV, E=16, W=4)
CONV_48 = subject(CONV, E=48, W=3)
FITTING = (MAMBA_16, MAMBA_80, GDN_16, GDN_64, GDN_80, KDA_16, KDA_128, CONV_16, CONV_48)
WIDE = (
    subject(MAMBA2, H=8, P=64, G=2, D=64),
    subject(DELTA, G=4, K=64, H=8, V=64, J=1),
    subject(DELTA, G=2, K=32, H=4, V=32, J=32),
    subject(CONV, E=768, W=4),
)  # large enough that torch splits loops and GEMMs between threads


def formed(
    reference: Iterable[Subject] = (), torch: Iterable[Subject] = (), compiled: Iterable[Subject] = ()
) -> pytest.MarkDecorator:
    """Parametrises `subject` and `form`."""
    pairs = [(subject, "reference") for subject in reference]
    pairs += [(subject, "torch") for subject in torch]
    cases = [pytest.param(*pair, id=f"{pair[0]}-{pair[1]}") for pair in pairs]
    cases += [pytest.param(s, "compiled", id=f"{s}-compiled", marks=needs_numba) for s in compiled]
    return pytest.mark.parametrize("subject,form", cases)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN and the sign of zero included."""
    kind = {4: torch.int32, 8: torch.int64, 2: torch.int16}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def rel_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


@dataclass(eq=False, repr=False)
class Plain:
    """One request in one call: outputs[L, ...], and what an edge leaves behind."""

    subject: Subject
    form: str
    chunk_len: int
    tokens: Tensors
    edges: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outputs, _ = self.run(self.tokens[0].shape[0])

    def run(self, num: int) -> tuple[torch.Tensor, Tensors]:
        states = self.subject.states(2, self.chunk_len, 0)
        inputs = [token[:num] for token in self.tokens]
        rows = (int32(0, num), int32(1), *[int32(0)] * 5)
        form = self.subject.form(self.form)
        return form(*inputs, *self.subject.constants(), *states, *rows, self.chunk_len), states

    def at_edge(self, edge: int) -> torch.Tensor:
        if edge not in self.edges:
            states = (
                self.run(edge)[1] if edge else [torch.zeros_like(s) for s in self.subject.states(2, 1, 0)]
            )
            self.edges[edge] = self.subject.at_edge(states, 1, edge)
        return self.edges[edge]


@dataclass(eq=False)
class Sequence:
    plain: Plain
    slot: int
    committed: int = 0
    edge: int = 0

    @property
    def left(self) -> int:
        return self.plain.tokens[0].shape[0] - self.committed


@dataclass(eq=False)
class Part:
    """A row: certain tokens, then drafts of which the first `accepted` are what really follows."""

    sequence: Sequence
    certain: int
    drafts: int = 0
    accepted: int = 0
    snapshot_slot: int = 0
    snapshot_edge: int = 0
    stored: bool = False  # whether the step passed that edge


class Host:
    """Slots, and steps that are checked against the plain runs bit for bit."""

    def __init__(
        self, subject: Subject, form: str, chunk_len: int, num_drafts: int, num_slots: int, seed: int
    ):
        self.subject, self.form, self.chunk_len, self.num_drafts = subject, form, chunk_len, num_drafts
        self.states = subject.states(num_slots, chunk_len, num_drafts)
        self.free = list(range(1, num_slots))
        self.rng = random.Random(seed)
        self.junk = iter(range(10_000, 10_000_000))

    def acquire(self) -> int:
        """A slot, poisoned or with the leavings of its last owner."""
        slot = self.free.pop(self.rng.randrange(len(self.free)))
        if self.rng.random() < 0.5:
            for tensor in self.states:
                tensor[slot] = float("nan")
        return slot

    def start(self, plain: Plain) -> Sequence:
        return Sequence(plain, self.acquire())

    def resume(self, plain: Plain, snapshot_slot: int, edge: int) -> Sequence:
        """A new sequence that goes on from a snapshot."""
        slot = self.acquire()
        for tensor in self.states:
            tensor[slot] = tensor[snapshot_slot]
        return Sequence(plain, slot, committed=edge, edge=edge)

    def step(self, parts: list[Part], padding: int = 0) -> None:
        """Run one step, with `padding` tokens in a dump row, and check what it may and may not change."""
        inputs = [self._tokens(part) for part in parts]
        if padding:
            inputs.append(self.subject.tokens(padding, next(self.junk)))
        lens = [0, *(tokens[0].shape[0] for tokens in inputs)]
        cu = torch.tensor(lens).cumsum(0).int()
        columns = [
            (s.slot, s.committed, s.edge, p.drafts, p.snapshot_slot, p.snapshot_edge)
            for p in parts
            for s in [p.sequence]
        ]
        columns += [(0, 0, 0, 0, 0, 0)] * bool(padding)
        rows = (cu, *(int32(*column) for column in zip(*columns, strict=True)))
        whole = [torch.cat(pieces) for pieces in zip(*inputs, strict=True)]
        before = [tensor.clone() for tensor in self.states]
        y = self.subject.form(self.form)(
            *whole, *self.subject.constants(), *self.states, *rows, self.chunk_len
        )
        if padding:
            assert (y[cu[-2] :] == 0).all(), "padding must come out as zeros"
        for part, first in zip(parts, cu.tolist(), strict=False):
            self._check(part, y[first:])
        self._check_strangers(before, parts)

    def _tokens(self, part: Part) -> Tensors:
        sequence, true = part.sequence, part.certain + part.accepted
        kept = [token[sequence.committed : sequence.committed + true] for token in sequence.plain.tokens]
        junk = self.subject.tokens(part.drafts - part.accepted, next(self.junk))
        return [torch.cat(pair) for pair in zip(kept, junk, strict=True)]

    def _check_strangers(self, before: Tensors, parts: list[Part]) -> None:
        busy = {p.sequence.slot for p in parts if p.certain + p.drafts}
        busy |= {p.snapshot_slot for p in parts if p.stored}
        others = [slot for slot in range(1, before[0].shape[0]) if slot not in busy]
        for old, new in zip(before, self.states, strict=True):
            assert same_bits(old[others], new[others]), "a slot that no row owns has changed"

    def _check(self, part: Part, y: torch.Tensor) -> None:
        sequence, true = part.sequence, part.certain + part.accepted
        if part.certain + part.drafts == 0:
            return
        wanted = sequence.plain.outputs[sequence.committed : sequence.committed + true]
        assert same_bits(y[:true], wanted), f"{part} differs from the plain run by {y[:true] - wanted}"
        new_edge = next_edge(sequence.committed, part.certain + part.drafts, part.drafts, self.chunk_len)
        part.stored = part.snapshot_slot > 0 and sequence.edge < part.snapshot_edge <= new_edge
        sequence.edge = new_edge
        sequence.committed += true
        self._check_slot(sequence.plain, sequence.slot, new_edge)
        if part.stored:
            self._check_slot(sequence.plain, part.snapshot_slot, part.snapshot_edge)

    def _check_slot(self, plain: Plain, slot: int, edge: int) -> None:
        held = self.subject.at_edge(self.states, slot, edge)
        assert same_bits(held, plain.at_edge(edge)), f"slot {slot} is not the plain run's at {edge}"


def storm(subject: Subject, form: str, chunk_len: int, num_drafts: int, seed: int, num_steps: int) -> int:
    """Random steps over a few sequences; returns the number of tokens that were checked."""
    rng = random.Random(seed)
    host = Host(subject, form, chunk_len, num_drafts, num_slots=9, seed=seed)
    plains = [
        Plain(
            subject,
            form,
            chunk_len,
            subject.tokens(rng.randrange(1, 3 * chunk_len + num_drafts + 2), seed * 100 + i),
        )
        for i in range(4)
    ]
    running: list[Sequence] = []
    snapshots: list[tuple[Plain, int, int]] = []
    checked = 0
    for _ in range(num_steps):
        while len(running) < 4 and len(host.free) > 1:
            if snapshots and rng.random() < 0.4:
                running.append(host.resume(*rng.choice(snapshots)))
            else:
                running.append(host.start(rng.choice(plains)))
        parts = [
            random_part(rng, sequence, host)
            for sequence in rng.sample(running, rng.randrange(1, len(running) + 1))
        ]
        host.step(parts, padding=rng.choice([0, 0, 1, 5]))
        for part in parts:
            sequence = part.sequence
            checked += part.certain + part.accepted
            if part.stored:
                snapshots.append((sequence.plain, part.snapshot_slot, part.snapshot_edge))
            elif part.snapshot_slot:
                host.free.append(part.snapshot_slot)
            if sequence.left == 0:
                running.remove(sequence)
                host.free.append(sequence.slot)
        if len(snapshots) > 2:
            host.free.append(snapshots.pop(0)[1])
    return checked


def random_part(rng: random.Random, sequence: Sequence, host: Host) -> Part:
    limit = min(sequence.left, rng.choice([0, 1, 1, 2, host.chunk_len, 3 * host.chunk_len]))
    certain = rng.randrange(limit + 1) if rng.random() < 0.5 else limit
    drafts = rng.randrange(host.num_drafts + 1) if certain else 0
    accepted = min(rng.randrange(drafts + 1), sequence.left - certain)
    part = Part(sequence, certain, drafts, accepted)
    if rng.random() < 0.3 and len(host.free) > 2:
        part.snapshot_slot = host.acquire()
        last = (sequence.committed + certain) // host.chunk_len * host.chunk_len
        part.snapshot_edge = rng.randrange(0, last + 2 * host.chunk_len, host.chunk_len)
    return part
