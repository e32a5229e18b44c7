"""The tensors that a checkpoint has of one matrix, and what is checked of them whatever their format."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch

from hemiola.builder.formats.declared import Declared
from hemiola.builder.lazy import LazyGroup
from hemiola.runtime.errors import Code, Refused

MOST = 2.0**100  # kernels scale by powers of two beside it


class Places(Protocol):
    """Reads a tensor's places begin .. end along a dimension, all without arguments."""

    def __call__(self, begin: int = 0, end: int | None = None, dim: int = 0, /) -> torch.Tensor: ...


class Stored(NamedTuple):
    """A tensor of a file."""

    name: str
    where: str  # the file's path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    read: Places

    def refused(
        self,
        reason: str,
        way_out: str = "download it again or use another checkpoint",
        code: Code = "damaged",
    ) -> Refused:
        """The tensor's name is the error's field."""
        return Refused(code, self.name, message=f"{self.where}: {self.name} {reason}", way_out=way_out)

    def require(self, *dtypes: str) -> None:
        if self.dtype not in dtypes:
            raise self.refused(f"is {self.dtype}, its format has {' or '.join(dtypes)}")

    def require_shape(self, *shape: int) -> None:
        if self.shape != shape:
            raise self.refused(f"has shape {list(self.shape)}, its format asks for {list(shape)}")

    def of_matrix(self, index: int, num: int) -> "Stored":
        """What one of `num` stacked matrices has of it; a single number is that of all."""
        if self.shape in ((), (1,)):
            return self
        if self.shape[0] != num:
            raise self.refused(f"has shape {list(self.shape)}, which is no stack of {num}")

        def read(begin: int = 0, end: int | None = None, dim: int = 0) -> torch.Tensor:
            matrix = self.read(index, index + 1)[0]
            return matrix[(slice(None),) * dim + (slice(begin, end),)] if matrix.dim() else matrix

        return Stored(f"{self.name}[{index}]", self.where, self.dtype, self.shape[1:], read)

    def scales(self, begin: int = 0, end: int | None = None, dim: int = 0) -> torch.Tensor:
        """Its content as fp32, all of which must be positive numbers, and none too large for any weight."""
        scales = self.read(begin, end, dim).float()
        wrong = int((~((scales < MOST) & (scales > 0))).sum())
        if wrong:
            raise self.refused(
                f"holds {wrong} of {scales.numel()} scales{self._place(begin, end, dim)} that are zero,"
                f" negative, NaN or beyond {MOST:g}"
            )
        return scales

    def e4m3(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Its content, without NaN codes."""
        codes = self.read(begin, end)
        wrong = codes.view(torch.uint8).bitwise_and(0x7F).eq(0x7F)
        if wrong.any():
            where = self._place(begin, end)
            raise self.refused(f"holds NaN ({int(wrong.sum())} of {codes.numel()} codes{where})")
        return codes

    def finite(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Its content, numbers without NaN or infinity."""
        content = self.read(begin, end)
        right = content.isfinite()
        if not right.all():
            wrong, where = content.numel() - int(right.sum()), self._place(begin, end)
            raise self.refused(f"holds NaN or infinity ({wrong} of {content.numel()} values{where})")
        return content

    def _place(self, begin: int, end: int | None, dim: int = 0) -> str:
        """Of a part, for errors."""
        num = self.shape[dim] if self.shape else 1
        last = num if end is None else min(end, num)
        return f" at {begin} to {last - 1}" if (begin, last) != (0, num) else ""


@dataclass(frozen=True)
class Module:
    """One matrix X of a checkpoint, or a stack: the tensors whose names begin with X, by the ends that they
    have in "X.weight_scale"."""

    name: str
    shape: tuple[int, ...]  # [O, F] or [E, O, F] that config.json asks for
    tensors: dict[str, Stored]
    joined: int = 1  # matrices of O / joined outputs that lie behind each other in it

    def matrices(self) -> Iterator["Module"]:
        """Those of a stack."""
        self.refuse_other_shape("weight_shape")
        own, num = {end: each for end, each in self.tensors.items() if end != "weight_shape"}, self.shape[0]
        for index in range(num):
            tensors = {end: each.of_matrix(index, num) for end, each in own.items()}
            yield Module(f"{self.name}[{index}]", self.shape[1:], tensors, self.joined)

    @property
    def num_outputs(self) -> int:
        return self.shape[-2]

    @property
    def num_inputs(self) -> int:
        return self.shape[-1]

    @property
    def of_all(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a tensor with one number for the matrix, or one for each of those joined in it."""
        return (), (1,), (1, 1), (self.joined,)

    def of(self, suffix: str) -> Stored:
        """The tensor of this name, which the format cannot do without."""
        if suffix not in self.tensors:
            beside = " and ".join(sorted(stored.name for stored in self.tensors.values()))
            raise next(iter(self.tensors.values())).refused(
                f"needs {self.name}.{suffix} beside it, and there is only {beside}",
                "the checkpoint is incomplete, download it again",
                "missing",
            )
        return self.tensors[suffix]

    def span(self, scales: Stored, num_spans: int, declared: Collection[int]) -> int:
        """Inputs that share one of `num_spans` scales, 0 for all of a row; `declared`: the group sizes that
        configs name."""
        fitting = [size for size in sorted(declared) if -(-self.num_inputs // size) == num_spans]
        if fitting:
            return fitting[0] if num_spans > 1 else 0
        if not declared and num_spans and self.num_inputs % num_spans == 0:
            return self.num_inputs // num_spans if num_spans > 1 else 0
        known = f"groups of {' or '.join(map(str, sorted(declared)))}" if declared else "equal groups"
        raise scales.refused(
            f"has shape {list(scales.shape)}, which does not cut {self.num_inputs} inputs into {known}",
            "correct config.json or use another checkpoint",
            "conflict",
        )

    def packed_words(self, declared: Collection[int], zeros_width: int) -> "PackedWords":
        """Of GPTQ and AWQ; `declared` as in `span`."""
        words, scales, zeros = (self.of(name) for name in ("qweight", "scales", "qzeros"))
        words.require("I32")
        zeros.require("I32")
        scales.require("F16", "BF16", "F32")
        num_spans = scales.shape[0] if len(scales.shape) == 2 else 0
        scales.require_shape(num_spans, self.num_outputs)
        span = self.span(scales, num_spans, declared)
        zeros.require_shape(num_spans, zeros_width)
        self.refuse_split_words(zeros, 4)
        return PackedWords(words, scales, zeros, span)

    def refuse_split_words(self, stored: Stored, bits: int) -> None:
        """Where outputs are packed, words belong to one of the matrices that were joined."""
        each = self.num_outputs // self.joined
        if self.joined > 1 and each * bits % 32:
            raise stored.refused(f"packs {self.joined} matrices of {each} outputs, which fill no whole words")

    def refuse_other_shape(self, suffix: str) -> None:
        """Where a tensor says how large the matrix is, each of a stack, or each of those joined."""
        stored = self.tensors.get(suffix)
        if stored is None:
            return
        stored.require("I64", "I32")
        num, (num_outputs, num_inputs) = prod(self.shape[:-2]), self.shape[-2:]
        if prod(stored.shape) > 2 * num * self.joined:
            stored.require_shape(2)
        parts = [num_outputs // self.joined, num_inputs] * self.joined
        sizes = stored.read().flatten().tolist()
        if sizes not in ([*self.shape], [num_outputs, num_inputs] * num, parts * num):
            raise stored.refused(f"is {sizes[:4]}, config.json asks for {[*self.shape]}")

    def refuse_order(self, suffix: str, span: int) -> None:
        """Where a tensor names the group of each input, it must be the usual one: inputs in their order."""
        order = self.tensors.get(suffix)
        if order is None:
            return
        order.require("I32", "I64")
        order.require_shape(self.num_inputs)
        usual = torch.arange(self.num_inputs) // (span or self.num_inputs)
        if not torch.equal(order.read().long(), usual):
            raise order.refused(
                "orders inputs by activation (desc_act, actorder)",
                "quantise the model without that, or use the bf16 checkpoint",
                "unsupported",
            )


class PackedWords(NamedTuple):
    """Codes of 4 or 8 bits in words, a scale and a zero point for each group of inputs."""

    words: Stored  # qweight, as its format lays it out
    scales: Stored  # [G, O]
    zeros: Stored  # qzeros [G, words of O zero points]
    span: int  # inputs of a group, 0: all


class Format(NamedTuple):
    """A file's entry in its `FORMATS`."""

    name: str
    methods: tuple[str, ...]  # as which configs declare it
    tensors: frozenset[str]  # that a matrix may have, by the ends of their names
    is_it: Callable[[Module], bool]
    find: Callable[[Module, Declared], LazyGroup]


def has(suffix: str) -> Callable[[Module], bool]:
    return lambda module: suffix in module.tensors


def by_row(numbers: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """One number for all outputs, for each half of them, or for each, as [O, 1]."""
    return numbers.reshape(-1, 1).repeat_interleave(num_outputs // numbers.numel(), 0)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] as codes [..., 2 n], the low four bits first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] as uint8 numbers [..., n * 32 / bits], the lowest bits first."""
    numbers = words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)  # dense, whatever its strides
    return numbers if bits == 8 else nibbles(numbers)


def centred(numbers: torch.Tensor, middle: int) -> torch.Tensor:
    """uint8 less their middle, int8."""
    return (numbers - middle).view(torch.int8)
