"""The tensors that a checkpoint has of one matrix, and what is checked of them whatever their format."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hemiola.plugins.groups import Layout, WeightGroup
from hemiola.runtime.errors import Refused

MOST = 2.0**100  # kernels scale by powers of two beside it


class Stored(NamedTuple):
    """A tensor of a file."""

    name: str
    where: str  # the file's path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    def refused(self, reason: str, way_out: str = "download it again or use another checkpoint") -> Refused:
        return Refused(f"{self.where}: {self.name} {reason}; {way_out}")

    def require(self, *dtypes: str) -> None:
        if self.dtype not in dtypes:
            raise self.refused(f"is {self.dtype}, its format has {' or '.join(dtypes)}")

    def require_shape(self, *shape: int) -> None:
        if self.shape != shape:
            raise self.refused(f"has shape {list(self.shape)}, its format asks for {list(shape)}")

    def scales(self) -> torch.Tensor:
        """Its content as fp32, all of which must be positive numbers, and none too large for any weight."""
        scales = self.read().float()
        wrong = int((~((scales < MOST) & (scales > 0))).sum())
        if wrong:
            raise self.refused(
                f"holds {wrong} of {scales.numel()} scales that are zero, negative, NaN or beyond {MOST:g}"
            )
        return scales

    def e4m3(self) -> torch.Tensor:
        """Its content, without NaN codes."""
        codes = self.read()
        wrong = int(codes.view(torch.uint8).bitwise_and(0x7F).eq(0x7F).sum())
        if wrong:
            raise self.refused(f"holds NaN ({wrong} of {codes.numel()} codes)")
        return codes


class Found(NamedTuple):
    """A quantised matrix in canonical form; nothing of it was read."""

    layout: Layout
    read: Callable[[], WeightGroup]


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
        )

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
            )


def by_row(scales: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """One scale, or one for each output, as [O, 1]."""
    return scales.reshape(-1, 1).expand(num_outputs, 1).contiguous()


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] as codes [..., 2 n], the low four bits first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] as int16 numbers [..., n * 32 / bits] from 0 up, the lowest bits first."""
    mask = (1 << bits) - 1
    return torch.stack([((words >> at) & mask).short() for at in range(0, 32, bits)], -1).flatten(-2)
