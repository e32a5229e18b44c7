"""A small host for the recurrent ops: sequences in slots, random ragged steps, plain runs to compare with."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from kit.ops import Subject, Tensors, next_edge, row, same_bits, subject

LIMITS = (0.02, 0.3)  # of Mamba2's steps; some random ones pass each
# For the reference alone: sizes that no compiled kernel takes.
MAMBA = subject("mamba2", *LIMITS, H=4, P=8, G=2, D=6)
GDN = subject("delta", G=1, K=6, H=3, V=5, J=1)
KDA = subject("delta", G=2, K=6, H=2, V=5, J=6)
CONV4 = subject("conv", E=7, W=4)
SMALL = (MAMBA, GDN, KDA, CONV4)
# Multiples of 16: 16 columns go through registers alone, 64 in fours. Heads fill no vector, or more than one.
MAMBA_16 = subject("mamba2", *LIMITS, H=20, P=16, G=5, D=16)
MAMBA_80 = subject("mamba2", *LIMITS, H=3, P=32, G=1, D=80)  # 64 in fours, 16 alone
GDN_16 = subject("delta", G=4, K=16, H=20, V=16, J=1)
GDN_64 = subject("delta", G=1, K=16, H=3, V=64, J=1)
GDN_80 = subject("delta", G=1, K=32, H=5, V=80, J=1)
KDA_16 = subject("delta", G=2, K=16, H=2, V=16, J=16)
KDA_128 = subject("delta", G=1, K=32, H=3, V=128, J=32, decay=20.0)
CONV_16 = subject("conv", E=16, W=4)
CONV_48 = subject("conv", E=48, W=3)
FITTING = (MAMBA_16, MAMBA_80, GDN_16, GDN_64, GDN_80, KDA_16, KDA_128, CONV_16, CONV_48)
WIDE = (
    subject("mamba2", *LIMITS, H=5, P=64, G=1, D=128),
    subject("delta", G=4, K=64, H=8, V=128, J=1),
    subject("delta", G=2, K=32, H=4, V=32, J=32),
    subject("conv", E=768, W=4),
)


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
        tokens = [token[:num] for token in self.tokens]
        return self.subject.run(self.form, tokens, states, [row(num_tokens=num)], self.chunk_len), states

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
    """A row: final tokens, then drafts of which the first `accepted` are what really follows."""

    sequence: Sequence
    final: int
    drafts: int = 0
    accepted: int = 0
    snapshot_slot: int = 0
    snapshot_edge: int = 0
    stored: bool = False  # whether the step passed that edge

    def row(self, first: int) -> tuple[int, ...]:
        num, s = self.final + self.drafts, self.sequence
        return (first, num, self.drafts, s.slot, s.committed, s.edge, self.snapshot_slot, self.snapshot_edge)


class Host:
    """Slots, and steps that are checked against the plain runs bit for bit."""

    def __init__(
        self, subject: Subject, form: str, chunk_len: int, num_drafts: int, num_slots: int, seed: int
    ):
        self.subject, self.form, self.chunk_len, self.num_drafts = subject, form, chunk_len, num_drafts
        self.states = subject.states(num_slots, chunk_len, num_drafts)
        self.free = list(range(1, num_slots))
        self.rng = random.Random(seed)
        self.seeds = iter(range(10_000, 10_000_000))

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
        """Run one step, in any order and with `padding` tokens of nobody's, and check what it may change."""
        pieces: list[Part | None] = [*parts, *[None] * padding]
        self.rng.shuffle(pieces)
        inputs = [self._junk(1) if part is None else self._tokens(part) for part in pieces]
        first, places, nobody = 0, {}, []
        for part, tokens in zip(pieces, inputs, strict=True):
            places[id(part)], first = first, first + tokens[0].shape[0]
            if part is None:
                nobody.append(first - 1)
        rows = [part.row(places[id(part)]) for part in parts]
        for _ in range(min(padding, 2)):  # whatever else a padding row says
            rows.insert(self.rng.randrange(len(rows) + 1), self._dump_row())
        whole = [torch.cat(tensors) for tensors in zip(*inputs, strict=True)]
        before = [tensor.clone() for tensor in self.states]
        y = self.subject.run(self.form, whole, self.states, rows, self.chunk_len)
        assert (y[nobody] == 0).all(), "padding must come out as zeros"
        for part in parts:
            self._check(part, y[places[id(part)] :])
        self._check_strangers(before, parts)

    def _dump_row(self) -> tuple[int, ...]:
        garbage = [self.rng.randrange(-(2**31), 2**31) for _ in range(8)]
        return (*garbage[:3], 0, *garbage[4:])

    def _tokens(self, part: Part) -> Tensors:
        sequence, true = part.sequence, part.final + part.accepted
        kept = [token[sequence.committed : sequence.committed + true] for token in sequence.plain.tokens]
        junk = self._junk(part.drafts - part.accepted)
        return [torch.cat(pair) for pair in zip(kept, junk, strict=True)]

    def _junk(self, num: int) -> Tensors:
        """Tokens that nothing true may read."""
        factor = self.rng.choice([1.0, self.subject.junk])
        return [token * factor for token in self.subject.tokens(num, next(self.seeds))]

    def _check_strangers(self, before: Tensors, parts: list[Part]) -> None:
        busy = {p.sequence.slot for p in parts if p.final + p.drafts}
        busy |= {p.snapshot_slot for p in parts if p.stored}
        others = [slot for slot in range(1, before[0].shape[0]) if slot not in busy]
        for old, new in zip(before, self.states, strict=True):
            assert same_bits(old[others], new[others]), "a slot that no row owns has changed"

    def _check(self, part: Part, y: torch.Tensor) -> None:
        sequence, true = part.sequence, part.final + part.accepted
        if part.final + part.drafts == 0:
            return
        wanted = sequence.plain.outputs[sequence.committed : sequence.committed + true]
        assert same_bits(y[:true], wanted), f"{part} differs from the plain run by {y[:true] - wanted}"
        new_edge = next_edge(sequence.committed, part.final + part.drafts, part.drafts, self.chunk_len)
        part.stored = part.snapshot_slot > 0 and sequence.edge < part.snapshot_edge <= new_edge
        sequence.edge = new_edge
        sequence.committed += true
        self._check_slot(sequence.plain, sequence.slot, new_edge)
        if part.stored:
            self._check_slot(sequence.plain, part.snapshot_slot, part.snapshot_edge)

    def _check_slot(self, plain: Plain, slot: int, edge: int) -> None:
        held = self.subject.at_edge(self.states, slot, edge)
        assert same_bits(held, plain.at_edge(edge)), f"slot {slot} is not the plain run's at {edge}"


def storm(
    subject: Subject,
    form: str,
    chunk_len: int,
    num_drafts: int,
    seed: int,
    num_steps: int,
    lengths: Iterable[int] = (),
) -> int:
    """Random steps over a few sequences; returns the number of tokens that were checked."""
    rng = random.Random(seed)
    host = Host(subject, form, chunk_len, num_drafts, num_slots=9, seed=seed)
    lengths = lengths or [rng.randrange(1, 3 * chunk_len + num_drafts + 2) for _ in range(4)]
    plains = [
        Plain(subject, form, chunk_len, subject.tokens(length, seed * 100 + i))
        for i, length in enumerate(lengths)
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
            checked += part.final + part.accepted
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
    limit = min(sequence.left, rng.choice([0, 1, 1, 2, *(n * host.chunk_len for n in (1, 3, 6))]))
    final = rng.randrange(limit + 1) if rng.random() < 0.5 else limit
    drafts = rng.randrange(host.num_drafts + 1) if final else 0
    accepted = min(rng.randrange(drafts + 1), sequence.left - final)
    part = Part(sequence, final, drafts, accepted)
    if rng.random() < 0.3 and len(host.free) > 2:
        part.snapshot_slot = host.acquire()
        last = (sequence.committed + final) // host.chunk_len * host.chunk_len
        part.snapshot_edge = rng.randrange(0, last + 2 * host.chunk_len, host.chunk_len)
    return part
