"""The laws of the state protocol: however a sequence is split, the bits are those of the plain run."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from kit.grid import (
    CONV4,
    CONV_48,
    FITTING,
    GDN,
    GDN_64,
    GDN_80,
    KDA,
    KDA_16,
    MAMBA,
    MAMBA_80,
    SMALL,
    WIDE,
    Host,
    Part,
    Plain,
    Subject,
    Tensors,
    formed,
    int32,
    needs_numba,
    rel_error,
    same_bits,
    storm,
)

from hemiola.plugins import bits, grid, jit
from hemiola.plugins.conv.spec import CONV
from hemiola.plugins.delta.spec import DELTA
from hemiola.plugins.mamba2.spec import MAMBA2

KINDS = (MAMBA, GDN, KDA, CONV4)
FIT = (MAMBA_80, GDN_64, KDA_16, CONV_48)
LAWS = formed(reference=KINDS, torch=KINDS, compiled=FIT)


def ids(value: object) -> str | None:
    return str(value) if isinstance(value, Subject) else None


def around_edges(chunk_len: int) -> list[int]:
    return [1, 2, 3, chunk_len - 1, chunk_len, chunk_len + 1, 2 * chunk_len, 3 * chunk_len + 1]


@formed(reference=SMALL, torch=SMALL, compiled=FITTING)
def test_every_split_in_two_is_the_whole(subject: Subject, form: str) -> None:
    chunk_len = 8
    for num in around_edges(chunk_len):
        plain = Plain(subject, form, chunk_len, subject.tokens(num, seed=num))
        host = Host(subject, form, chunk_len, 0, num_slots=num + 2, seed=0)
        sequences = [host.start(plain) for _ in range(num)]
        host.step([Part(sequence, certain=i + 1) for i, sequence in enumerate(sequences)])
        host.step([Part(sequence, certain=sequence.left) for sequence in sequences])


@pytest.mark.parametrize("chunk_len", [8, 16, 32])
@formed(torch=SMALL, compiled=FITTING)
def test_token_by_token_is_one_shot(subject: Subject, form: str, chunk_len: int) -> None:
    plain = Plain(subject, form, chunk_len, subject.tokens(3 * chunk_len + 1, seed=1))
    host = Host(subject, form, chunk_len, 0, num_slots=3, seed=0)
    sequence = host.start(plain)
    while sequence.left:
        host.step([Part(sequence, certain=1)])


@pytest.mark.parametrize("num_drafts", [1, 3, 20])
@LAWS
def test_a_rejected_draft_was_never_there(subject: Subject, num_drafts: int, form: str) -> None:
    """Every number of accepted drafts at every place of a chunk, then a step without drafts."""
    chunk_len = 8
    plain = Plain(subject, form, chunk_len, subject.tokens(2 * chunk_len + 2 * num_drafts + 2, seed=2))
    for accepted in sorted({0, 1, num_drafts // 2, num_drafts}):
        host = Host(subject, form, chunk_len, num_drafts, num_slots=chunk_len + 2, seed=accepted)
        sequences = [host.start(plain) for _ in range(chunk_len)]
        host.step([Part(sequence, certain=i + 1) for i, sequence in enumerate(sequences)])
        for drafts, kept in ((num_drafts, accepted), (0, 0), (num_drafts, 0), (1, 1)):
            host.step([Part(sequence, 1, drafts, min(kept, sequence.left - 1)) for sequence in sequences])


def check_copies(host: Host, plain: Plain, snapshot_slot: int, edge: int) -> None:
    """Sequences that start from a snapshot, in pieces and with drafts, are the plain run."""
    pieces, whole = (host.resume(plain, snapshot_slot, edge) for _ in range(2))
    host.step([Part(pieces, min(1, pieces.left), host.num_drafts), Part(whole, whole.left)])
    host.step([Part(pieces, pieces.left)])
    host.free += [pieces.slot, whole.slot]


@LAWS
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
            held = [tensor[target].clone() for tensor in host.states]
            host.step([ask])
            if not ask.stored:
                assert all(same_bits(a, b[target]) for a, b in zip(held, host.states, strict=True))
        assert [ask.stored for ask in asks].count(True) == 1
        check_copies(host, plain, target, 16)


@LAWS
def test_padding_and_empty_rows_do_nothing(subject: Subject, form: str) -> None:
    chunk_len = 8
    plain = Plain(subject, form, chunk_len, subject.tokens(2 * chunk_len, seed=4))
    host = Host(subject, form, chunk_len, 3, num_slots=4, seed=0)
    busy, idle = host.start(plain), host.start(plain)
    host.step([Part(busy, 5), Part(idle, 7, drafts=3, accepted=3)], padding=31)  # idle: records cross an edge
    held = [tensor[idle.slot].clone() for tensor in host.states]
    host.step([Part(idle, 0), Part(busy, 1), Part(idle, 0)], padding=40)
    assert all(same_bits(old, new[idle.slot]) for old, new in zip(held, host.states, strict=True))
    host.step([Part(idle, 1), Part(busy, 1)])


@formed(torch=KINDS, compiled=FIT)
def test_a_step_of_padding_only(subject: Subject, form: str) -> None:
    states = subject.states(3, 8, 0)
    tokens = subject.tokens(32, seed=0)
    for rows in ((int32(0, 32), *[int32(0)] * 6), (int32(0, 0), int32(1), *[int32(0)] * 5)):
        y = subject.form(form)(*tokens, *subject.constants(), *states, *rows, 8)
        assert (y == 0).all()
    assert all(tensor[1:].isnan().all() for tensor in states)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("chunk_len,num_drafts", [(8, 0), (8, 20), (16, 3), (16, 5), (32, 1), (32, 20)])
@pytest.mark.parametrize("subject", SMALL, ids=ids)
def test_storm(
    subject: Subject, chunk_len: int, num_drafts: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:
        monkeypatch.setattr(grid, "BIG_STATE", 0)  # read the states where they lie
    assert storm(subject, "torch", chunk_len, num_drafts, seed, num_steps=16) > 0


@needs_numba
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("chunk_len,num_drafts", [(8, 20), (16, 3), (32, 1)])
@pytest.mark.parametrize("subject", FITTING, ids=ids)
def test_storm_of_the_compiled_form(subject: Subject, chunk_len: int, num_drafts: int, seed: int) -> None:
    assert storm(subject, "compiled", chunk_len, num_drafts, seed, num_steps=24) > 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("subject", KINDS, ids=ids)
def test_storm_of_the_reference(subject: Subject, seed: int) -> None:
    assert storm(subject, "reference", 8, 3, seed, num_steps=10) > 0


@formed(torch=WIDE, compiled=(*WIDE, GDN_80, MAMBA_80))
def test_threads_and_neighbours_change_no_bit(
    subject: Subject, form: str, threads: int, poisoned_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes at which torch splits its loops; the plain run is made with one thread."""
    monkeypatch.setattr(bits, "WORK_OF_A_THREAD", 1 << 12)
    monkeypatch.setattr(jit, "WORTH_A_THREAD", -1)
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
            certain, drafts = min(sequence.left, rng.choice([1, 1, 37])), rng.randrange(num_drafts + 1)
            parts.append(Part(sequence, certain, drafts, min(drafts, sequence.left - certain)))
        host.step(parts, padding=rng.choice([0, 3]))
        running = [sequence for sequence in running if sequence.left]


@formed(torch=KINDS, compiled=FITTING)
def test_columns_of_a_wider_tensor_are_the_tensor(subject: Subject, form: str) -> None:
    """A layer cuts its inputs out of one projection; how far apart their tokens lie changes no bit."""
    num = 27
    tokens = subject.tokens(num, seed=8)
    flat = [token.flatten(1) for token in tokens]
    wide = torch.cat([torch.full((num, 5), torch.nan), *flat, torch.full((num, 3), torch.nan)], dim=1)
    cuts = wide[:, 5:-3].split([part.shape[1] for part in flat], dim=1)
    columns = [cut.unflatten(1, token.shape[1:]) for cut, token in zip(cuts, tokens, strict=True)]
    crossed = [token.mT.contiguous().mT for token in tokens]  # no token's numbers lie side by side

    def run(inputs: Tensors) -> Tensors:
        states = subject.states(3, 8, 3)
        rows = (int32(0, 20, num), int32(1, 2), int32(0, 0), int32(0, 0), int32(3, 0), *[int32(0, 0)] * 2)
        return [subject.form(form)(*inputs, *subject.constants(), *states, *rows, 8), *states]

    expected = run(tokens)
    for inputs in (columns, crossed):
        assert all(same_bits(a, b) for a, b in zip(run(inputs), expected, strict=True))


@needs_numba
@pytest.mark.parametrize("subject", FIT, ids=ids)
def test_fp32_of_fitting_sizes_is_compiled_and_the_rest_is_not(subject: Subject) -> None:
    """Which form ran shows in the last bits."""
    constants, rows = subject.constants(), (int32(0, 50), int32(1), *[int32(0)] * 5)
    tokens = subject.tokens(50, seed=13)

    def run(form: str, inputs: Tensors) -> torch.Tensor:
        dtype = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
        return subject.form(form)(*inputs, *subject.states(2, 16, 0, dtype), *rows, 16)

    ours = run("cpu", [*tokens, *constants])
    assert same_bits(ours, run("compiled", [*tokens, *constants]))
    assert not same_bits(ours, run("torch", [*tokens, *constants]))
    args = subject.op.args
    half = [t.bfloat16() if torch.bfloat16 in arg.dtypes else t for arg, t in zip(args, tokens, strict=False)]
    for inputs in ([t.double() for t in (*tokens, *constants)], [*half, *constants]):
        assert same_bits(run("cpu", inputs), run("torch", inputs))


@needs_numba
@pytest.mark.parametrize("subject", FIT, ids=ids)
def test_one_argument_that_does_not_fit_goes_to_torch(subject: Subject) -> None:
    def to_torch(*values: object) -> torch.Tensor:
        return torch.tensor(7.0)

    op = replace(subject.op, in_torch=to_torch)
    states = subject.states(2, 16, 0)
    rows = (int32(0, 4), int32(1), *[int32(0)] * 5)
    inputs = [*subject.tokens(4, seed=0), *subject.constants(), *states]
    assert op.cpu()(*inputs, *rows, 16).shape[0] == 4
    for index, value in enumerate(inputs):
        for dtype in set(op.args[index].dtypes) - {torch.float32}:
            other = [*inputs[:index], value.to(dtype), *inputs[index + 1 :]]
            assert op.cpu()(*other, *rows, 16) == 7, f"{op.args[index].name} in {dtype}"
    for index in range(len(subject.tokens(1, seed=0)), len(inputs)):
        strided = torch.stack([inputs[index]] * 2, dim=-1)[..., 0]
        other = [*inputs[:index], strided, *inputs[index + 1 :]]
        assert op.cpu()(*other, *rows, 16) == 7, f"{op.args[index].name} with gaps"
    for letter in op.lanes or "":
        odd = replace(subject, sizes=tuple((n, 24 if n == letter else size) for n, size in subject.sizes))
        inputs = [*odd.tokens(4, seed=0), *odd.constants(), *odd.states(2, 16, 0)]
        assert op.cpu()(*inputs, *rows, 16) == 7, f"{letter} = 24"


@pytest.mark.parametrize("records", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("subject", (*KINDS, *FIT), ids=ids)
def test_bfloat16_inputs_split_anywhere(subject: Subject, records: torch.dtype) -> None:
    """Whatever the rings keep of a token, its own step reads the same."""
    chunk_len, num = 8, 21
    half = {arg.name for arg in subject.op.args if torch.bfloat16 in arg.dtypes}
    names = [arg.name for arg in subject.op.args]
    tokens = subject.tokens(num, 0)
    tokens = [t.bfloat16() if name in half else t for name, t in zip(names, tokens, strict=False)]

    def run(lens: list[int]) -> torch.Tensor:
        held = [arg.name for arg in subject.op.args if arg.mutated]
        states = subject.states(2, chunk_len, 0)
        states = [s.to(records) if name in half else s for name, s in zip(held, states, strict=True)]
        y, position = [], 0
        for length in lens:
            edge = int32(position // 8 * 8)
            rows = (int32(0, length), int32(1), int32(position), edge, *[int32(0)] * 3)
            step = [t[position : position + length] for t in tokens]
            y.append(subject.form("cpu")(*step, *subject.constants(), *states, *rows, chunk_len))
            position += length
        return torch.cat(y)

    whole = run([num])
    assert whole.dtype == torch.bfloat16
    assert whole.isfinite().all()
    assert same_bits(run([1] * num), whole)
    assert same_bits(run([5, 11, 5]), whole)


@pytest.mark.parametrize("chunk_len", [8, 16, 32, 64])
@formed(torch=SMALL, compiled=FITTING)
def test_both_forms_are_the_reference(subject: Subject, form: str, chunk_len: int) -> None:
    """All lengths around the edges in one step; fp32 sums differ from the fp64 loop by fp32's rounding."""
    lens = around_edges(chunk_len)
    num = len(lens)
    slots = torch.arange(1, 2 * num + 1).int()
    none = torch.zeros(num, dtype=torch.int32)
    edges = [length // chunk_len * chunk_len for length in lens]
    rows = (
        torch.tensor([0, *lens]).cumsum(0).int(),
        slots[:num],
        none,
        none,
        none,
        slots[num:],
        int32(*edges),
    )
    tokens = [*subject.tokens(sum(lens), seed=6), *subject.constants()]

    def run(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        states = subject.states(2 * num + 1, chunk_len, 0, dtype)
        y = subject.form(name)(*(token.to(dtype) for token in tokens), *states, *rows, chunk_len)
        held = [*enumerate(edges, start=1)]
        held += [(slot + num, edge) for slot, edge in held if edge]  # edge 0 is no snapshot
        return [y, *(subject.at_edge(states, slot, edge) for slot, edge in held)]

    wanted = run("reference", torch.float64)
    bounds = {torch.float32: 1e-5} | ({torch.float64: 1e-13} if form == "torch" else {})
    for dtype, bound in bounds.items():
        for ours, theirs in zip(run(form, dtype), wanted, strict=True):
            assert rel_error(ours, theirs) < bound


@formed(torch=(MAMBA, GDN, KDA), compiled=(MAMBA_80, GDN_64, KDA_16))
def test_long_sequences_stay_exact(subject: Subject, form: str) -> None:
    """10,000 tokens in random splits against one fp64 loop; the second half decays by a small constant."""
    chunk_len, num = 16, 10_000
    tokens = subject.tokens(num, seed=7)
    decay = tokens[3]  # dt or g
    decay[num // 2 :] = decay.sign()[0] * 1e-3
    states = subject.states(2, chunk_len, 3)
    y, position, rng = [], 0, random.Random(7)
    while position < num:
        step = min(rng.choice([1, 2, 5, 100, 300]), num - position)
        edge = position // chunk_len * chunk_len
        rows = (int32(0, step), int32(1), int32(position), int32(edge), *[int32(0)] * 3)
        inputs = [token[position : position + step] for token in tokens]
        y.append(subject.form(form)(*inputs, *subject.constants(), *states, *rows, chunk_len))
        position += step

    exact = subject.states(2, chunk_len, 3, torch.float64)
    inputs = [token.double() for token in (*tokens, *subject.constants())]
    wanted = subject.op.reference(*inputs, *exact, int32(0, num), int32(1), *[int32(0)] * 5, chunk_len)
    assert rel_error(torch.cat(y), wanted) < 1e-5
    assert rel_error(states[0][1], exact[0][1]) < 1e-5


def call(subject: Subject, form: str, num: int = 4, **rows: int) -> torch.Tensor:
    """One row of `num` tokens, C = 8, rings without room for drafts."""
    names = ("slot_id", "committed", "edge", "num_drafts", "snapshot_slot", "snapshot_edge")
    columns = dict.fromkeys(names, 0) | {"slot_id": 1} | rows
    inputs = (*subject.tokens(num, 0), *subject.constants(), *subject.states(3, 8, 0), int32(0, num))
    return subject.form(form)(*inputs, *(int32(value) for value in columns.values()), 8)


@LAWS
@pytest.mark.parametrize(
    "rows",
    [
        {"committed": 9, "edge": 3},
        {"committed": 3, "edge": 8},
        {"num_drafts": 5},
        {"edge": -8},
        {"num_drafts": -1},
        {"snapshot_slot": 2, "snapshot_edge": 7},
    ],
    ids=str,
)
def test_insane_rows_are_refused(subject: Subject, form: str, rows: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="row 0: 4 tokens"):
        call(subject, form, **rows)


@formed(torch=KINDS, compiled=FIT)
@pytest.mark.parametrize("rows", [{"committed": 17}, {"num": 12, "num_drafts": 12}], ids=str)
def test_a_ring_too_small_is_refused(subject: Subject, form: str, rows: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a ring holds"):
        call(subject, form, **rows)


@pytest.mark.parametrize("op", [CONV, MAMBA2, DELTA], ids=lambda op: op.name)
def test_declared_shapes_and_types_are_checked(op: object) -> None:
    subject = {CONV: CONV4, MAMBA2: MAMBA, DELTA: GDN}[op]
    args = [
        *subject.tokens(4, 0),
        *subject.constants(),
        *subject.states(3, 8, 0),
        int32(0, 4),
        *[int32(0)] * 6,
    ]
    op.check(*args)
    for index, arg in enumerate(op.args):
        for wrong in (args[index].unsqueeze(0), args[index].bool()):
            with pytest.raises(ValueError, match=f"{op.name}: {arg.name} "):
                op.check(*args[:index], wrong, *args[index + 1 :])


class Layer(torch.nn.Module):
    def __init__(self, subject: Subject):
        super().__init__()
        self.op = subject.form("cpu")
        self.constants = subject.constants()

    def forward(self, tokens: Tensors, states: Tensors, rows: Tensors) -> torch.Tensor:
        return self.op(*tokens, *self.constants, *states, *rows, 8) * 2


@pytest.mark.parametrize("subject", (*KINDS, *FIT), ids=ids)
def test_export_keeps_lengths_free_and_states_in_place(subject: Subject) -> None:
    def inputs(lens: list[int], states: Tensors) -> tuple[Tensors, ...]:
        num = len(lens)
        cu = torch.tensor([0, *lens]).cumsum(0).int()
        rows = [cu, torch.arange(1, num + 1).int(), *(torch.zeros(num, dtype=torch.int32) for _ in range(5))]
        return subject.tokens(sum(lens), 1), states, rows

    states = subject.states(5, 8, 3)
    T, N = torch.export.Dim("num_tokens", max=4096), torch.export.Dim("num_rows", max=64)
    dynamic = ([{0: T}] * len(subject.tokens(1, 0)), [None] * len(states), [{0: N + 1}] + [{0: N}] * 6)
    example = inputs([3, 9], [tensor.clone() for tensor in states])
    program = torch.export.export(Layer(subject), example, dynamic_shapes=dynamic, strict=False)
    mine, theirs = [tensor.clone() for tensor in states], [tensor.clone() for tensor in states]
    y = program.module()(*inputs([1, 17, 4], mine))
    assert same_bits(y, Layer(subject)(*inputs([1, 17, 4], theirs)))
    assert all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))
    assert not mine[0][2].isnan().all()


@needs_numba
@pytest.mark.parametrize("subject", [MAMBA_80, GDN_64, KDA_16], ids=ids)
@pytest.mark.parametrize("rows", [{"slot_id": 3}, {"slot_id": -1}, {"snapshot_slot": 99, "snapshot_edge": 0}])
def test_a_slot_that_is_not_there_is_refused(subject: Subject, rows: dict[str, int]) -> None:
    """Compiled code would write to somebody else's memory; a snapshot that no step passes it never writes."""
    if "snapshot_slot" in rows:
        call(subject, "compiled", **rows)
        return
    with pytest.raises(IndexError, match="rows name slot"):
        call(subject, "compiled", **rows)
