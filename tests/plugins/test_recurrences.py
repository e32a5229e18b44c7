"""The laws of the state protocol: however a sequence is split, the bits are those of the plain run."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from kit.grid import (
    CONV4,
    CONV_48,
    FITTING,
    GDN,
    GDN_64,
    KDA,
    KDA_16,
    KDA_128,
    MAMBA,
    MAMBA_16,
    MAMBA_80,
    SMALL,
    WIDE,
    Host,
    Part,
    Plain,
    storm,
)
from kit.ops import Subject, formed, rel_error, row

from hemiola.plugins.cpu import kernel

FIT = (MAMBA_80, GDN_64, KDA_16, CONV_48)
LAWS = formed(compiled=FIT)


def around_edges(chunk_len: int) -> list[int]:
    return [1, 2, 3, chunk_len - 1, chunk_len, chunk_len + 1, 2 * chunk_len, 3 * chunk_len + 1]


@formed(reference=SMALL, compiled=FITTING)
def test_every_split_in_two_is_the_whole(subject: Subject, form: str) -> None:
    chunk_len = 8
    for num in around_edges(chunk_len):
        plain = Plain(subject, form, chunk_len, subject.tokens(num, seed=num))
        host = Host(subject, form, chunk_len, 0, num_slots=num + 2, seed=0)
        sequences = [host.start(plain) for _ in range(num)]
        host.step([Part(sequence, final=i + 1) for i, sequence in enumerate(sequences)])
        host.step([Part(sequence, final=sequence.left) for sequence in sequences])


@pytest.mark.parametrize("num_drafts", [1, 3, 20])
@LAWS
def test_a_rejected_draft_was_never_there(subject: Subject, num_drafts: int, form: str) -> None:
    """Every number of accepted drafts at every place of a chunk, then a step without drafts."""
    chunk_len = 8
    plain = Plain(subject, form, chunk_len, subject.tokens(2 * chunk_len + 2 * num_drafts + 2, seed=2))
    for accepted in sorted({0, 1, num_drafts // 2, num_drafts}):
        host = Host(subject, form, chunk_len, num_drafts, num_slots=chunk_len + 2, seed=accepted)
        sequences = [host.start(plain) for _ in range(chunk_len)]
        host.step([Part(sequence, final=i + 1) for i, sequence in enumerate(sequences)])
        for drafts, kept in ((num_drafts, accepted), (0, 0), (num_drafts, 0), (1, 1)):
            host.step([Part(sequence, 1, drafts, min(kept, sequence.left - 1)) for sequence in sequences])


def check_copies(host: Host, plain: Plain, snapshot_slot: int, edge: int) -> None:
    """Sequences that start from a snapshot, in pieces and with drafts, are the plain run."""
    pieces, whole = (host.resume(plain, snapshot_slot, edge) for _ in range(2))
    host.step([Part(pieces, min(1, pieces.left), host.num_drafts), Part(whole, whole.left)])
    host.step([Part(pieces, pieces.left)])
    host.free += [pieces.slot, whole.slot]


@formed(reference=(MAMBA, CONV4), compiled=FIT)
def test_a_snapshot_of_any_edge_of_a_prompt_chunk(subject: Subject, form: str) -> None:
    chunk_len = 8
    plain = Plain(subject, form, chunk_len, subject.tokens(6 * chunk_len, seed=3))
    for before, edge, drafts in itertools.product((0, 1, 7, 8, 13), range(0, 48, chunk_len), (0, 3)):
        host = Host(subject, form, chunk_len, 3, num_slots=5, seed=before + edge)
        original = host.start(plain)
        host.step([Part(original, before)])
        ask = Part(original, 29 - drafts, drafts, 2 * bool(drafts), host.acquire(), snapshot_edge=edge)
        host.step([ask])
        assert ask.stored == (before // 8 * 8 < edge <= (before + 29 - drafts) // 8 * 8)
        if ask.stored:
            check_copies(host, plain, ask.snapshot_slot, edge)
        host.step([Part(original, original.left)])


@LAWS
def test_edges_inside_an_accepted_window_are_saved(subject: Subject, form: str) -> None:
    """20 drafts at C = 8: records cross up to three edges, and the next step passes all of them."""
    chunk_len, num_drafts = 8, 20
    plain = Plain(subject, form, chunk_len, subject.tokens(60, seed=11))
    for prompt, accepted, after in itertools.product(
        (1, 6, 8, 15), (7, 8, 19, 20), ((1, 0), (9, 0), (1, 20))
    ):
        passed = range(prompt // 8 * 8, prompt + 1 + accepted + 2 * chunk_len, chunk_len)
        num = len(passed)
        host = Host(subject, form, chunk_len, num_drafts, num_slots=2 * num + 4, seed=prompt + accepted)
        sequences = [host.start(plain) for _ in passed]
        host.step([Part(sequence, prompt) for sequence in sequences])
        targets = [host.acquire() for _ in passed]
        asks = [
            [
                Part(sequence, *tokens, snapshot_slot=slot, snapshot_edge=edge)
                for sequence, slot, edge in zip(sequences, targets, passed, strict=True)
            ]
            for tokens in ((1, num_drafts, accepted), after, (3,))
        ]
        for step in asks:
            host.step(step)
        stored = [[part.stored for part in parts] for parts in zip(*asks, strict=True)]
        assert not any(stored[0]) and all(sum(marks) <= 1 for marks in stored)
        assert sum(map(any, stored)) >= accepted // chunk_len
        for marks, slot, edge in zip(stored, targets, passed, strict=True):
            if any(marks):
                check_copies(host, plain, slot, edge)


@LAWS
def test_only_the_step_that_passes_the_edge_stores_it(subject: Subject, form: str) -> None:
    """A host that runs ahead asks again and again, before the edge and behind it."""
    chunk_len = 8
    plain = Plain(subject, form, chunk_len, subject.tokens(40, seed=12))
    for sizes in ([1] * 30, [5] * 6, [7, 9, 14], [3, 13, 8, 6], [16, 1, 13]):
        host = Host(subject, form, chunk_len, 3, num_slots=5, seed=len(sizes))
        sequence, target = host.start(plain), host.acquire()
        for tensor in host.states:
            tensor[target] = float("nan")
        asks = [Part(sequence, size, 3, snapshot_slot=target, snapshot_edge=16) for size in sizes]
        for ask in asks:
            host.step([ask])  # checks that a step that does not pass the edge leaves the target alone
        assert [ask.stored for ask in asks].count(True) == 1
        check_copies(host, plain, target, 16)


@formed(reference=SMALL, compiled=FIT)
@pytest.mark.parametrize(
    "rows",
    [[], [row(slot=0, num_tokens=32)], [row(slot=0, num_tokens=9, committed=7, first=-3)], [row()]],
    ids=str,
)
def test_a_step_of_padding_only(subject: Subject, form: str, rows: list[tuple[int, ...]]) -> None:
    states = subject.states(3, 8, 0)
    y = subject.run(form, subject.tokens(32, seed=0), states, rows or [row(slot=0)], 8)
    assert (y == 0).all()
    assert all(tensor.isnan().all() for tensor in states)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chunk_len,num_drafts", [(8, 0), (8, 20), (16, 3), (32, 1)])
@formed(compiled=FITTING)
def test_storm(subject: Subject, form: str, chunk_len: int, num_drafts: int, seed: int) -> None:
    assert storm(subject, form, chunk_len, num_drafts, seed, num_steps=24) > 0


@formed(reference=SMALL)
def test_storm_of_the_reference(subject: Subject, form: str) -> None:
    assert storm(subject, form, 8, 3, seed=0, num_steps=10) > 0


@formed(compiled=(*WIDE, MAMBA_16, MAMBA_80, KDA_128))
def test_threads_and_neighbours_change_no_bit(
    subject: Subject, form: str, threads: int, poisoned_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain run is made with one thread."""
    monkeypatch.setattr(kernel, "WORTH_A_THREAD", -1)
    chunk_len, num_drafts = 16, 3
    torch.set_num_threads(1)
    plains = [Plain(subject, form, chunk_len, subject.tokens(num, seed=num)) for num in (113, 40, 7)]
    for plain in plains:
        for edge in range(0, plain.outputs.shape[0] + 1, chunk_len):
            plain.at_edge(edge)
    torch.set_num_threads(threads)
    host = Host(subject, form, chunk_len, num_drafts, num_slots=9, seed=5)
    rng = random.Random(5)
    running = [host.start(plains[i % 3]) for i in range(8)]
    while running:
        parts = []
        for sequence in rng.sample(running, len(running)):
            final, drafts = min(sequence.left, rng.choice([1, 1, 37])), rng.randrange(num_drafts + 1)
            parts.append(Part(sequence, final, drafts, min(drafts, sequence.left - final)))
        host.step(parts, padding=rng.choice([0, 3]))
        running = [sequence for sequence in running if sequence.left]


@pytest.mark.parametrize("chunk_len", [8, 16, 32, 64])
@formed(compiled=FITTING)
def test_compiled_is_the_reference(subject: Subject, form: str, chunk_len: int) -> None:
    """All lengths around the edges in one step; fp32 sums differ from the fp64 loop by fp32's rounding."""
    lens = around_edges(chunk_len)
    num = len(lens)
    edges = [length // chunk_len * chunk_len for length in lens]
    rows = [
        row(first=first, num_tokens=length, slot=n + 1, snapshot_slot=n + 1 + num, snapshot_edge=edge)
        for n, (first, length, edge) in enumerate(
            zip(itertools.accumulate([0, *lens]), lens, edges, strict=False)
        )
    ]
    tokens = subject.tokens(sum(lens), seed=6)

    def run(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        states = subject.states(2 * num + 1, chunk_len, 0, dtype)
        y = subject.run(name, [token.to(dtype) for token in tokens], states, rows, chunk_len)
        held = [*enumerate(edges, start=1)]
        held += [(slot + num, edge) for slot, edge in held if edge]  # edge 0 is no snapshot
        return [y, *(subject.at_edge(states, slot, edge) for slot, edge in held)]

    for ours, theirs in zip(run(form, torch.float32), run("reference", torch.float64), strict=True):
        assert rel_error(ours, theirs) < 1e-5


NUM, CHUNK, WINDOW = 10_000, 16, 11  # tokens, chunk, drafts
Step = tuple[int, int, int]  # final tokens, drafts, accepted ones among them


@cache
def sequential(subject: Subject) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and last state: one token after the other, in fp64. The second half barely decays."""
    tokens = [token.double() for token in long_tokens(subject)]
    states = subject.states(2, CHUNK, 0, torch.float64)
    return subject.run("reference", tokens, states, [row(num_tokens=NUM)], CHUNK), states[0][1]


def long_tokens(subject: Subject) -> list[torch.Tensor]:
    tokens = subject.tokens(NUM, seed=7)
    if subject.name != "conv":
        tokens[3][NUM // 2 :] = -7.0  # dt or a
    return tokens


def one_shot() -> Iterator[Step]:
    yield NUM, 0, 0


def chunks() -> Iterator[Step]:
    dice, done = random.Random(1), 0
    while done < NUM:
        num = min(dice.choice([1, 2, 5, CHUNK - 1, CHUNK, 100, 1000]), NUM - done)
        yield num, 0, 0
        done += num


def accepted_windows() -> Iterator[Step]:
    """The last step has no drafts, so that all tokens are final."""
    dice, done = random.Random(2), 1000
    yield 1000, 0, 0
    while done < NUM - 1:
        accepted = min(dice.choice([0, 3, WINDOW, WINDOW]), NUM - done - 2)
        yield 1, WINDOW, accepted
        done += 1 + accepted
    yield 1, 0, 0


@pytest.mark.parametrize("steps", [one_shot, chunks, accepted_windows], ids=lambda steps: steps.__name__)
@formed(compiled=(replace(MAMBA_80, attrs=(1e-3, 0.3)), GDN_64, KDA_16, CONV_48))
def test_10000_tokens_stay_exact(subject: Subject, form: str, steps: Callable[[], Iterator[Step]]) -> None:
    """Against fp64: rounding neither grows nor piles up."""
    tokens, junk = long_tokens(subject), subject.tokens(WINDOW, seed=1)
    states = subject.states(2, CHUNK, WINDOW)
    outputs, committed, edge = [], 0, 0
    for final, drafts, accepted in steps():
        kept = [token[committed : committed + final + accepted] for token in tokens]
        inputs = [torch.cat((a, b[: drafts - accepted])) for a, b in zip(kept, junk, strict=True)]
        line = row(num_tokens=final + drafts, num_drafts=drafts, committed=committed, edge=edge)
        outputs.append(subject.run(form, inputs, states, [line], CHUNK)[: final + accepted])
        edge = (committed + final) // CHUNK * CHUNK
        committed += final + accepted
    assert edge == committed == NUM
    wanted, state = sequential(subject)
    assert rel_error(torch.cat(outputs), wanted) < 2e-6  # seen: 3e-7
    if subject.name != "conv":
        assert rel_error(states[0][1], state) < 2e-6


def call(subject: Subject, form: str, **columns: int) -> torch.Tensor:
    """One row of 4 tokens, C = 8, rings without room for drafts."""
    num = columns.setdefault("num_tokens", 4)
    return subject.run(form, subject.tokens(max(num, 0), 0), subject.states(3, 8, 0), [row(**columns)], 8)


@pytest.mark.parametrize(
    "rows",
    [
        {"committed": 9, "edge": 3},
        {"committed": 3, "edge": 8},
        {"num_drafts": 5},
        {"edge": -8},
        {"num_drafts": -1},
        {"num_tokens": -1},
        {"snapshot_slot": 2, "snapshot_edge": 7},
    ],
    ids=str,
)
@formed(reference=(MAMBA, GDN, KDA, CONV4), compiled=FIT)
def test_insane_rows_are_refused(subject: Subject, form: str, rows: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"a row contradicts itself or chunk_len 8: .*'slot': 1"):
        call(subject, form, **rows)


@pytest.mark.parametrize("rows", [{"committed": 9}, {"num_tokens": 9, "num_drafts": 9}], ids=str)
@LAWS
def test_a_ring_too_small_is_refused(subject: Subject, form: str, rows: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a ring holds"):
        call(subject, form, **rows)


@pytest.mark.parametrize(
    "rows", [{"slot": 3}, {"slot": -1}, {"first": 1}, {"first": -1}, {"num_tokens": 9}], ids=str
)
@LAWS
def test_what_is_not_there_is_refused(subject: Subject, form: str, rows: dict[str, int]) -> None:
    """Compiled code would write to somebody else's memory."""
    tokens, states = subject.tokens(4, 0), subject.states(3, 16, 0)
    with pytest.raises(IndexError, match="rows name slot"):
        subject.run(form, tokens, states, [row(**{"num_tokens": 4} | rows)], 16)
    assert all(state.isnan().all() for state in states)


@LAWS
def test_a_snapshot_slot_that_no_step_passes_is_not_looked_at(subject: Subject, form: str) -> None:
    call(subject, form, snapshot_slot=99, snapshot_edge=0)
    with pytest.raises(IndexError, match="rows name slot 99"):
        call(subject, form, num_tokens=8, snapshot_slot=99, snapshot_edge=8)
