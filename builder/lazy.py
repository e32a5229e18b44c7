"""Tensors that stay on disk until they are needed: plain ones, and quantised weights.

All are read by lines, the parts of their first dimension: rows of a matrix, or experts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar

import torch

from hemiola.plugins.gpu.lines import pack_lines
from hemiola.plugins.gpu.words import pack_words, pack_words_in_parts
from hemiola.plugins.groups import Layout, WeightGroup, dequantised, joined
from hemiola.plugins.linear.spec import strips
from hemiola.plugins.spec import Pack

PIECE = 2**22  # bytes of a weight that are made at a time, or a line of it; that takes up to 50 times as many
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Read(Protocol[T_co]):
    """Lines begin .. end of something, one at least, all without arguments; `end` may lie beyond the last."""

    def __call__(self, begin: int = 0, end: int | None = None, /) -> T_co: ...


class Unpacked(NamedTuple):
    """What a weight was before it was packed for a GPU (plugins/gpu/words.py, lines.py)."""

    layout: Layout
    shape: tuple[int, ...]


class LazyGroup(NamedTuple):
    """A quantised matrix in canonical form; nothing of it was read."""

    layout: Layout
    read: Read[WeightGroup]
    static: float = 0.0  # the scale of its inputs; 0: they have none of the checkpoint's, or several


@dataclass(frozen=True)
class Lazy:
    """A tensor that is not in memory: its shape and dtype are known, `read` makes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Read[torch.Tensor]
    std: float | None = None  # of normal numbers that stand for the weight (random_weights.py)
    group: LazyGroup | None = None  # a quantised weight; `read()` makes its numbers in fp32
    words: "Unpacked | None" = None  # of a packed one of random numbers
    ranked: bool = False  # each rank has another part (cut.py)
    whole: bool = False  # some lines take as much memory and time as all

    @staticmethod
    def of(tensor: torch.Tensor) -> "Lazy":
        def read(begin: int = 0, end: int | None = None) -> torch.Tensor:
            return tensor[begin:end] if tensor.dim() else tensor

        return Lazy(tuple(tensor.shape), tensor.dtype, read)

    @staticmethod
    def all_at_once(
        shape: tuple[int, ...],
        dtype: torch.dtype,
        make: Callable[[], torch.Tensor],
        std: float | None = None,
        ranked: bool = False,
    ) -> "Lazy":
        """Of what nobody can make a part."""

        def read(begin: int = 0, end: int | None = None) -> torch.Tensor:
            return make()[begin:end] if shape else make()

        return Lazy(shape, dtype, read, std, ranked=ranked, whole=True)

    @staticmethod
    def quantised(
        shape: tuple[int, ...], group: LazyGroup, std: float | None = None, ranked: bool = False
    ) -> "Lazy":
        def read(begin: int = 0, end: int | None = None) -> torch.Tensor:
            return dequantised(group.read(begin, end))

        return Lazy(shape, torch.float32, read, std, group=group, ranked=ranked)

    @property
    def layout(self) -> Layout | None:
        """Of a quantised weight."""
        return None if self.group is None else self.group.layout

    @property
    def kind(self) -> tuple[Layout | None, float]:
        """What parts of one layer have in common: their layout, and the scale of their inputs."""
        return self.layout, self.group.static if self.group is not None else 0.0

    def of_a_rank(self) -> "Lazy":
        return replace(self, ranked=True)

    def take(self, order: Callable[[torch.Tensor], torch.Tensor], dim: int = 0) -> "Lazy":
        """The rows whose numbers `order` makes of the numbers of all. dim: 1 for those of each expert."""
        rows = order(torch.arange(self.shape[dim]))

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:, rows.to(tensor.device)]

        shape, group = (*self.shape[:dim], len(rows), *self.shape[dim + 1 :]), self.group
        if group is not None:
            part = group._replace(read=_taken(group.read, rows, joined, WeightGroup.map))
            if dim:
                part = group._replace(read=lambda begin=0, end=None: group.read(begin, end).map(pick))
            return Lazy.quantised(shape, part, self.std, self.ranked)
        if dim:
            return self.map(pick, by_line=True)
        read = _taken(self.read, rows, torch.cat, lambda tensor, function: function(tensor))
        return replace(self, shape=shape, read=read)

    def columns(self, begin: int, end: int) -> "Lazy":
        """These inputs of a dense layer; of a quantised one whole spans."""
        group = self.group
        if group is None:
            return self.map(lambda weight: weight[..., begin:end], by_line=True)
        shape = (*self.shape[:-1], end - begin)
        part = group._replace(read=lambda b=0, e=None: group.read(b, e).columns(begin, end))
        return Lazy.quantised(shape, part, self.std, self.ranked)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor], by_line: bool = False) -> "Lazy":
        """`function` of this tensor, applied when it is read.

        by_line: each line of the result needs that line of this alone.
        """
        assert self.group is None, "a quantised weight is changed by rows alone"
        result = function(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        shape = tuple(result.shape)
        if not by_line:
            return Lazy.all_at_once(shape, result.dtype, lambda: function(self.read()), self.std, self.ranked)

        def read(begin: int = 0, end: int | None = None) -> torch.Tensor:
            return function(self.read(begin, end))

        return replace(self, shape=shape, dtype=result.dtype, read=read)

    def packed(self, pack: Pack) -> "Lazy":
        """In the layout that a form asks for."""
        from hemiola.plugins.cpu.tiles import STRIP

        group, rows, words, std = self.group, self.shape[0], None, self.std
        if group is None:
            source, result = self.read, pack(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        else:
            source, result = group.read, pack(WeightGroup.empty(group.layout, self.shape))
            is_drawn = std is not None and pack in (pack_words, pack_lines)
            words = Unpacked(group.layout, self.shape) if is_drawn else None
            std = std if words else None
        each = 1 if len(self.shape) == 3 else STRIP if pack is strips else 0  # rows of a packed line

        def read(begin: int = 0, end: int | None = None) -> torch.Tensor:
            return pack(source(begin * each, rows if end is None else min(end * each, rows)))

        def make() -> torch.Tensor:
            if group is None or pack is not pack_words:
                return pack(source())
            num_rows = max(1, rows * PIECE // max(result.nbytes, 1))
            return pack_words_in_parts(group.read, group.layout, self.shape, num_rows)

        shape = tuple(result.shape)
        made = Lazy.all_at_once(shape, result.dtype, make)
        if each:
            made = Lazy(shape, result.dtype, read, whole=self.whole)
        return replace(made, std=std, words=words, ranked=self.ranked)

    def cast(self, dtype: torch.dtype) -> "Lazy":
        assert self.group is None, "a form takes a quantised weight that it does not pack"
        return self.map(lambda tensor: tensor.to(dtype), by_line=bool(self.shape))

    def pieces(self, most_bytes: int) -> Iterator[torch.Tensor]:
        """All of it in order, whole lines of so many bytes at a time, or one."""
        if self.whole or not self.shape:
            yield self.read()
            return
        num = self.shape[0]
        step = max(1, num * most_bytes // max(self.nbytes, 1))
        for begin in range(0, num, step):
            yield self.read(begin, min(begin + step, num))

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _taken(
    read: Read[T],
    rows: torch.Tensor,
    cat: Callable[[list[T]], T],
    apply: Callable[[T, Callable[[torch.Tensor], torch.Tensor]], T],
) -> Read[T]:
    """Reads these rows: neighbours at once, each once."""

    def part(begin: int = 0, end: int | None = None) -> T:
        known, places = rows[begin:end].unique(return_inverse=True)
        cuts = (known.diff() != 1).nonzero().flatten() + 1
        parts = [read(int(run[0]), int(run[-1]) + 1) for run in known.tensor_split(cuts)]
        whole = parts[0] if len(parts) == 1 else cat(parts)
        is_ordered = torch.equal(places, torch.arange(len(known)))
        return whole if is_ordered else apply(whole, lambda tensor: tensor[places.to(tensor.device)])

    return part


def join(parts: Sequence[Lazy]) -> Lazy:
    """Several tensors as one, along the first dimension, in the smallest dtype that holds them all; quantised
    ones of one layout."""
    dtype, ends = _dtype(parts), torch.tensor([p.shape[0] for p in parts]).cumsum(0).tolist()
    shape = (ends[-1], *parts[0].shape[1:])
    assert all(part.shape[1:] == shape[1:] for part in parts)

    def runs(begin: int, end: int | None) -> Iterator[tuple[Lazy, int, int]]:
        """What lines begin .. end consist of."""
        last = ends[-1] if end is None else min(end, ends[-1])
        for part, stop in zip(parts, ends, strict=True):
            start = stop - part.shape[0]
            low, high = max(begin, start), min(last, stop)
            if low < high:
                yield part, low - start, high - start

    return _joined(parts, shape, dtype, runs, torch.cat)


def stacked(parts: Iterable[Lazy]) -> Lazy:
    """Tensors of one shape along a new first dimension."""
    known = list(parts)
    shape = (len(known), *known[0].shape)

    def runs(begin: int, end: int | None) -> Iterator[tuple[Lazy, int, int | None]]:
        return ((part, 0, None) for part in known[begin:end])

    return _joined(known, shape, _dtype(known), runs, torch.stack)


def _dtype(parts: Sequence[Lazy]) -> torch.dtype:
    assert len({part.layout for part in parts}) == 1
    dtype = parts[0].dtype
    for part in parts:
        dtype = torch.promote_types(dtype, part.dtype)
    return dtype


def _joined(
    parts: Sequence[Lazy],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    runs: Callable[[int, int | None], Iterable[tuple[Lazy, int, int | None]]],
    function: Callable[[list[torch.Tensor]], torch.Tensor],
) -> Lazy:
    """What `function` makes of the runs."""
    std, ranked = parts[0].std, any(part.ranked for part in parts)
    if parts[0].group is not None:

        def read_group(begin: int = 0, end: int | None = None) -> WeightGroup:
            read = [p.group.read(b, e) for p, b, e in runs(begin, end) if p.group is not None]
            return joined(read, function)

        statics = {part.group.static for part in parts if part.group is not None}
        group = LazyGroup(parts[0].group.layout, read_group, statics.pop() if len(statics) == 1 else 0.0)
        return Lazy.quantised(shape, group, std, ranked)

    def read(begin: int = 0, end: int | None = None) -> torch.Tensor:
        return function([p.read(b, e).to(dtype) for p, b, e in runs(begin, end)])

    return Lazy(shape, dtype, read, std, ranked=ranked, whole=any(part.whole for part in parts))
