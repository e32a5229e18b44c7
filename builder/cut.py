"""Which part of a layer a rank has (--tp): rows of what it computes, columns of what it reads.

A checkpoint's matrix has parts one behind the other: q, k and v, or z, x, B, C and dt. Each is cut by
itself, so a rank has neighbouring heads of each. What is not cut lies on every rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hemiola.builder.lazy import Lazy
from hemiola.plugins.groups import Layout
from hemiola.plugins.inputs import SPAN
from hemiola.runtime.errors import Code, Refused


class Cut(NamedTuple):
    """One rank's part of `size` equal ones."""

    size: int = 1
    rank: int = 0
    is_segment: bool = False  # --same-bits asked for this part, and not --tp

    def share(self, what: str, num: int) -> int:
        """How many of `num` a rank has."""
        if num % self.size:
            known = [str(size) for size in (1, 2, 4) if size < self.size and num % size == 0]
            message = f"{self._asked} does not divide {what}, which is {num}"
            raise self._refused("conflict", message, f"use --tp {' or '.join(known)}")
        return num // self.size

    @property
    def _asked(self) -> str:
        return f"--same-bits ({self.size} parts)" if self.is_segment else f"--tp {self.size}"

    def _refused(self, code: Code, message: str, way_out: str) -> Refused:
        if self.is_segment:
            return Refused(code, "same_bits", True, message=message, way_out="leave --same-bits out")
        return Refused(code, "tp", self.size, message=message, way_out=way_out)

    def share_of_kv_heads(self, heads: int, kv_heads: int) -> int:
        """One at least: ranks share a head of keys and values where there are fewer heads than ranks."""
        self.share("num_attention_heads", heads)
        if self.size > kv_heads and self.size % kv_heads == 0:
            return 1
        return self.share("num_key_value_heads", kv_heads)

    def rows(self, lazy: Lazy, parts: Sequence[int], dim: int = 0) -> Lazy:
        """The rank's rows of each of these parts."""
        if self.size == 1:
            return lazy
        assert sum(parts) == lazy.shape[dim]
        shares = [self.share(f"{part} rows", part) for part in parts]

        def rank_rows(rows: torch.Tensor) -> torch.Tensor:
            spans = zip(rows.split(list(parts)), shares, strict=True)
            return torch.cat([span[self.rank * share :][:share] for span, share in spans])

        return lazy.take(rank_rows, dim).of_a_rank()

    def kv_rows(self, lazy: Lazy, kv_heads: int) -> Lazy:
        """The rank's keys or values; a head may be that of several ranks."""
        if self.size <= kv_heads:
            return self.rows(lazy, [lazy.shape[0]])
        width, head = lazy.shape[0] // kv_heads, self.rank * kv_heads // self.size
        return lazy.take(lambda rows: rows[head * width :][:width]).of_a_rank()

    def columns(self, lazy: Lazy) -> Lazy:
        """The rank's inputs."""
        if self.size == 1:
            return lazy
        share = self.share("its inner width", lazy.shape[-1])
        layout = lazy.layout or Layout("e4m3", 0)
        span = layout.span or (SPAN if layout.inputs == "group" else 0)
        if layout.inputs == "token":
            message = f"{self._asked} cuts inputs of which a token has one scale"
            raise self._refused("unsupported", message, "leave --act-dtype out")
        if span and share % span:
            whose = "a part" if self.is_segment else "a rank"
            message = (
                f"{self._asked} leaves {whose} {share} inputs of a layer whose scales are for {span} each"
            )
            raise self._refused("conflict", message, "use fewer ranks, or plain weights")
        return lazy.columns(self.rank * share, (self.rank + 1) * share).of_a_rank()

    def segments(self, num: int) -> "list[Cut]":
        """The rank's parts where sums are in so many segments, whatever the number of ranks; 1: as it is."""
        if num == 1:
            return [self]
        each = num // self.size
        return [Cut(num, self.rank * each + n, is_segment=True) for n in range(each)]


WHOLE = Cut()
SEGMENTS = 8  # of sums that all numbers of ranks compute alike
