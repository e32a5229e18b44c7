"""Ops with sizes: arguments for a call of any of them, forms as an engine runs them, and how to compare."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit import redzones

from hemiola.plugins import OPS
from hemiola.plugins.attention.pages import CODES
from hemiola.plugins.ranks import make_group, window_bytes
from hemiola.plugins.rows import COLUMNS
from hemiola.plugins.spec import Op

Tensors = list[torch.Tensor]
FRESH = dict.fromkeys(COLUMNS, 0) | {"slot": 1}


@cache
def group_of_one() -> torch.Tensor:
    """Ranks, of which there is one (plugins/ranks.py)."""
    room = 4096
    memory = torch.zeros(64 + window_bytes(room) // 8, dtype=torch.int64)
    _KEPT.append(memory)
    start = memory.data_ptr() + -memory.data_ptr() % 64
    return make_group(0, [start + 64], room, start)


_KEPT: list[torch.Tensor] = []


def form(op: Op, name: str) -> Callable[..., Any]:
    """The reference, or a form as an engine runs it: chosen, its weights packed, its sizes bound."""
    if name == "reference":
        return op.reference

    def run(*values: Any) -> Any:
        call = op.call(*values)
        chosen = op.choose(call, "cpu").form
        assert chosen.name == name
        given = list(values)
        for index, arg in enumerate(op.args):
            if arg.name in chosen.packs:
                given[index] = chosen.packs[arg.name](_as_kept(values[index]))
        with redzones.given(given, [arg.mutated for arg in op.args]) as given:
            return op.bind(chosen.name, [call.sizes[letter] for letter in chosen.sizes])(*given)

    return run


def _as_kept(weight: torch.Tensor) -> torch.Tensor:
    """Numbers that bfloat16 holds are bfloat16 in a checkpoint, and packed as such."""
    half = weight.bfloat16()
    return half if torch.equal(half.float(), weight) else weight


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def row(**columns: int) -> tuple[int, ...]:
    """A line of `rows`; what is not given is 0, the slot is 1."""
    return tuple((FRESH | columns)[name] for name in COLUMNS)


def next_edge(committed: int, num_tokens: int, num_drafts: int, chunk_len: int) -> int:
    """The last chunk edge that final tokens have passed: where a slot's state stands after a step."""
    return (committed + num_tokens - num_drafts) // chunk_len * chunk_len


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN and the sign of zero included."""
    kind = {4: torch.int32, 8: torch.int64, 2: torch.int16, 1: torch.uint8}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def rel_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||, NaN where one is in either."""
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / b.norm().clamp(min=1e-30)).item()


@dataclass(frozen=True)
class Subject:
    """An op with the sizes of its letters, and its attributes behind chunk_len."""

    name: str
    sizes: tuple[tuple[str, int], ...]
    attrs: tuple = ()
    absent: str = ""  # the optional argument that is not given
    decay: float = 1.0  # strength of A
    kept: torch.dtype = torch.float32  # of states of `arguments`
    junk: float = torch.nan  # what tokens may be, times a random number, that nothing true may read
    option: str = ""  # of the op's, that is given

    def __str__(self) -> str:
        option = [self.option] if self.option else []
        return "-".join((self.name, *(f"{k}{v}" for k, v in self.sizes), *map(str, self.attrs), *option))

    @property
    def op(self) -> Op:
        return OPS[self.name]

    def make(self, name: str, num_tokens: int, seed: int, num_rows: int = 2) -> torch.Tensor:
        """An argument that is no state and not `rows`."""
        known = [*self.op.args, *self.op.options]
        index = [arg.name for arg in known].index(name)
        sizes = {"T": num_tokens, "N": num_rows, "2": 2} | dict(self.sizes)
        if name == self.absent:
            return torch.empty(0)
        shape = [sizes[letter] for letter in known[index].shape.rstrip("*")]
        rng = torch.Generator().manual_seed(1000 * seed + index)
        value = torch.randn(shape, generator=rng)
        match self.name, name:
            case _, "group":
                return group_of_one()
            case _, "A":
                return -(value.abs() + 0.1) * self.decay
            case _, "dt_bias":
                return value / 2 - 2
            case "delta", "q" | "k":
                return F.normalize(value, dim=-1)
            case "attention", "positions":
                return int32(*range(num_tokens - num_rows + 1), *[0] * (num_rows - 1))[:num_tokens]
            case _, "positions":
                return torch.randint(sizes["M"], shape, generator=rng).int()
            case _, "page_table":
                return (
                    (torch.randperm(sizes["Z"] - 1, generator=rng) + 1)[: shape[0] * shape[1]]
                    .view(shape)
                    .int()
                )
            case _, "token_ids":
                return torch.randint(sizes["V"], shape, generator=rng).int()
            case _, "expert_ids":
                return torch.rand(num_tokens, sizes["E"], generator=rng).argsort(1)[:, : shape[1]].int()
            case "linear" | "moe", "weight" | "up" | "down":
                value = value * shape[-1] ** -0.5
                return value if shape[-1] % 2 else value.bfloat16().float()  # kept as bfloat16 or as fp32
        return value

    def tokens(self, num: int, seed: int) -> Tensors:
        """Everything that comes per token."""
        return [self.make(arg.name, num, seed) for arg in self.op.args if arg.shape[0] == "T"]

    def constants(self) -> Tensors:
        """Everything else that is neither a state nor `rows`."""
        rest = [arg for arg in self.op.args if arg.shape[0] not in "TN" and not arg.mutated]
        return [self.make(arg.name, 0, 99) for arg in rest]

    def states(
        self, num_slots: int, chunk_len: int, num_drafts: int, dtype: torch.dtype = torch.float32
    ) -> Tensors:
        """Slots full of NaN."""
        sizes = dict(self.sizes) | {"S": num_slots}
        sizes["R"] = chunk_len + num_drafts + (sizes["W"] - 1 if self.name == "conv" else 0)
        held = [[sizes[letter] for letter in arg.shape] for arg in self.op.args if arg.mutated]
        return [torch.full(shape, torch.nan, dtype=dtype) for shape in held]

    def at_edge(self, states: Tensors, slot: int, edge: int) -> torch.Tensor:
        """What a slot holds of an edge: the state, or the raw columns before it."""
        if self.name != "conv":
            return states[0][slot].clone()
        before = range(max(edge - dict(self.sizes)["W"] + 1, 0), edge)
        return states[0][slot][[place % states[0].shape[1] for place in before]].clone()

    def run(
        self, name: str, tokens: Tensors, states: Tensors, rows: list[tuple[int, ...]], chunk_len: int
    ) -> torch.Tensor:
        """A step of a recurrent op; constants in the dtype of its tokens."""
        constants = [constant.to(tokens[0].dtype) for constant in self.constants()]
        lines = torch.tensor(rows, dtype=torch.int32)
        return form(self.op, name)(*tokens, *constants, *states, lines, chunk_len, *self.attrs)

    def arguments(self, num_tokens: int, seed: int = 0, num_rows: int = 2) -> list:
        """A whole call: fresh rows, of one token each but the first; states are NaN."""
        sizes = {"S": num_rows + 1, "R": 40} | dict(self.sizes)
        long = num_tokens - num_rows + 1
        rows = [row(num_tokens=max(long, 0))]
        rows += [row(first=long + n, num_tokens=int(long > 0), slot=n + 2) for n in range(num_rows - 1)]
        made: list = []
        for arg in self.op.args:
            if arg.mutated:
                made.append(poisoned([sizes[letter] for letter in arg.shape], self.kept))
            elif arg.name == "rows":
                made.append(int32(*rows))
            else:
                made.append(self.make(arg.name, num_tokens, seed, num_rows))
        chunk_len = [16] if self.op.attrs and self.op.attrs[0].name == "chunk_len" else []
        option = [self.make(self.option, num_tokens, seed, num_rows)] if self.option else []
        return [*made, *chunk_len, *self.attrs, *option]


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """NaN; pages of codes are bytes of it."""
    return torch.full(shape, 0xFF if dtype is CODES else torch.nan, dtype=dtype)


def subject(
    name: str, *attrs: object, absent: str = "", decay: float = 1.0, option: str = "", **sizes: int
) -> Subject:
    if name == "attention":
        sizes = {"A": sizes["D"], "B": sizes["D"]} | sizes  # of plain pages
    return Subject(name, tuple(sizes.items()), attrs, absent, decay, option=option)


def run(subject: Subject, values: list, name: str = "compiled") -> Tensors:
    """A whole call: results, then states; the states given stay."""
    values = [
        v.clone() if i < len(subject.op.args) and subject.op.args[i].mutated else v
        for i, v in enumerate(values)
    ]
    results = form(subject.op, name)(*values)
    states = [value for arg, value in zip(subject.op.args, values, strict=False) if arg.mutated]
    return [*(results if isinstance(results, tuple) else (results,)), *states]


def check(subject: Subject, arguments: list) -> None:
    """The compiled form is the reference in fp64."""
    exact = [torch.float64 in arg.dtypes for arg in subject.op.args]
    wide = [
        v.double() if i < len(exact) and exact[i] and v.itemsize > 1 else v for i, v in enumerate(arguments)
    ]
    for mine, wanted in zip(run(subject, arguments), run(subject, wide, "reference"), strict=True):
        assert mine.is_contiguous() and mine.shape == wanted.shape
        if mine.dtype == torch.int32:
            assert torch.equal(mine, wanted)
        else:
            assert torch.equal(mine.isnan(), wanted.isnan())
            assert rel_error(mine.double().nan_to_num(), wanted.double().nan_to_num()) < 1e-6


def formed(reference: Iterable[Subject] = (), compiled: Iterable[Subject] = ()) -> pytest.MarkDecorator:
    """Parametrises `subject` and `form`."""
    pairs = [(subject, "reference") for subject in reference] + [
        (subject, "compiled") for subject in compiled
    ]
    return pytest.mark.parametrize(
        "subject,form", [pytest.param(*pair, id=f"{pair[0]}-{pair[1]}") for pair in pairs]
    )


def both_forms(name: str) -> Any:
    """A fixture: the op's reference, then its compiled form."""
    return pytest.fixture(params=["reference", "compiled"])(lambda request: form(OPS[name], request.param))


def _table(op: str) -> ModuleType:
    """tests/plugins/<op>/subjects.py: SUBJECTS, what its compiled form takes, the base first; AHEAD, a small
    one of an op that TensorRT launches by itself."""
    path = Path(__file__).parents[1] / "plugins" / op / "subjects.py"
    assert path.is_file(), f"{path} is missing; write SUBJECTS = [subject({op!r}, ATTRIBUTES, LETTER=SIZE)]"
    spec = spec_from_file_location(f"subjects_of_{op}", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(made := module_from_spec(spec))
    return made


_TABLES = {name: _table(name) for name, op in OPS.items() if not op.ending}
SUBJECTS: dict[str, list[Subject]] = {name: table.SUBJECTS for name, table in _TABLES.items()}
ALL = [subject for same_op in SUBJECTS.values() for subject in same_op]
AHEAD: dict[str, Subject] = {n: table.AHEAD for n, table in _TABLES.items() if hasattr(table, "AHEAD")}
