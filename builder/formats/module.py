"""The tensors that a checkpoint has of one matrix, and what is checked of them whatever their format."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
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
    """One matrix X of a checkpoint: the tensors whose names begin with "X.", by the rest of their names."""

    name: str
    shape: tuple[int, ...]  # [..., O, F] that config.json asks for
    tensors: dict[str, Stored]

    @property
    def num_outputs(self) -> int:
        return self.shape[-2]

    @property
    def num_inputs(self) -> int:
        return self.shape[-1]

    def of(self, suffix: str) -> Stored:
        """The tensor of this name, which the format cannot do without."""
        if suffix not in self.tensors:
            beside = " and ".join(f"{self.name}.{other}" for other in sorted(self.tensors))
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
        return PackedWords(words, scales, zeros, span)

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


def by_row(scales: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """One scale, or one for each output, as [O, 1]."""
    return scales.reshape(-1, 1).expand(num_outputs, 1).contiguous()


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] as codes [..., 2 n], the low four bits first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] as uint8 numbers [..., n * 32 / bits], the lowest bits first."""
    found = words.contiguous().view(torch.uint8)
    return found if bits == 8 else nibbles(found)


def centred(numbers: torch.Tensor, middle: int) -> torch.Tensor:
    """uint8 less their middle, int8."""
    return (numbers - middle).view(torch.int8)
