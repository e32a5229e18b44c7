"""What an op is: one declaration, from which the torch op and its fake are made.

An op's folder holds `spec.py` (the declaration), `reference.py` (the truth: a plain loop) and its kernels.
Shapes are strings of letters, one per dimension: T tokens, N rows, S slots, H heads, and so on; a letter
means the same size wherever it stands in one declaration. The ONNX schema and the TensorRT plugin will be
derived from the same declaration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch

from hemiola.plugins import jit

LIBRARY = torch.library.Library("hemiola", "DEF")

FLOAT = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP32 = (torch.float32, torch.float64)
INT = (torch.int32,)


class Arg(NamedTuple):
    """One tensor argument; `*` as a last letter of `shape` admits a zero-length tensor, meaning absent."""

    name: str
    shape: str
    dtypes: tuple[torch.dtype, ...] = FLOAT
    mutated: bool = False


class Attr(NamedTuple):
    """One constant argument, fixed when the graph is built."""

    name: str
    type: type


# The rows of a step, as every recurrent op reads them. Row n owns tokens cu_tokens[n]..cu_tokens[n+1]; they
# stand at the absolute positions committed[n], committed[n] + 1, ...; the last num_drafts[n] of them are
# only proposed. The row's slot holds the state after edge[n] tokens and records of the tokens
# edge[n]..committed[n]. After the step it holds the state at `next_edge` (below) and records from there on.
# If snapshot_slot[n] is not 0 and the step passes snapshot_edge[n], a chunk edge with
# edge[n] < snapshot_edge[n] <= next_edge, the snapshot slot becomes a slot that stands at that edge, without
# records; else it is left alone. Slot 0 is the dump slot: padding writes there, nothing reads it.
ROWS = (
    Arg("cu_tokens", "M", INT),  # M = N + 1
    Arg("slot_id", "N", INT),
    Arg("committed", "N", INT),
    Arg("edge", "N", INT),
    Arg("num_drafts", "N", INT),
    Arg("snapshot_slot", "N", INT),
    Arg("snapshot_edge", "N", INT),
)


def next_edge(committed: int, num_tokens: int, num_drafts: int, chunk_len: int) -> int:
    """The last chunk edge that certain tokens have passed: where a slot's state stands after a step."""
    return (committed + num_tokens - num_drafts) // chunk_len * chunk_len


@dataclass(frozen=True)
class Op:
    """A declared op. `result` is the shape of its single output, in the dtype of its first argument.

    On a CPU it runs as torch calls, which take every dtype and size, or as plugins/<name>/compiled.py, which
    takes fp32 only and multiples of 16 where `lanes` has a letter (None: there is no such file).
    """

    name: str
    args: tuple[Arg, ...]
    attrs: tuple[Attr, ...]
    result: str
    reference: Callable[..., torch.Tensor]
    in_torch: Callable[..., torch.Tensor]
    lanes: str | None = None

    def schema(self) -> str:
        """The torch.library schema; mutated arguments carry an alias mark."""
        marks = iter("abcdefghijk")
        parts = [f"Tensor({next(marks)}!) {a.name}" if a.mutated else f"Tensor {a.name}" for a in self.args]
        parts += [f"{a.type.__name__} {a.name}" for a in self.attrs]
        return f"{self.name}({', '.join(parts)}) -> Tensor"

    def register(self) -> "Op":
        """Define `torch.ops.hemiola.<name>`: the CPU form, and a shape-checking fake for export."""
        LIBRARY.define(self.schema())
        LIBRARY.impl(self.name, self.cpu(), "CPU")
        torch.library.register_fake(f"hemiola::{self.name}", self._fake, lib=LIBRARY)
        return self

    def cpu(self) -> Callable[..., torch.Tensor]:
        """The compiled form where numba is there and a call fits it, else the torch form."""
        if self.lanes is None or not jit.AVAILABLE:
            return self.in_torch
        compiled = getattr(import_module(f"hemiola.plugins.{self.name}.compiled"), self.name)
        floats = [n for n, arg in enumerate(self.args) if torch.float32 in arg.dtypes]
        whole = [n for n in floats if self.args[n].shape[0] != "T"]  # weights and states: read as they lie
        places: dict[str, tuple[int, int]] = {}  # an argument and a dimension that has the letter's size
        for n, arg in enumerate(self.args):
            places |= {letter: (n, dim) for dim, letter in enumerate(arg.shape)}
        sizes = [places[letter] for letter in self.lanes]

        def run(*values: Any) -> torch.Tensor:
            for n in floats:
                if values[n].dtype is not torch.float32:
                    return self.in_torch(*values)
            for n in whole:
                if not values[n].is_contiguous():
                    return self.in_torch(*values)
            for n, dim in sizes:
                if values[n].size(dim) % 16:
                    return self.in_torch(*values)
            return compiled(*values)

        return run

    def _fake(self, *values: torch.Tensor) -> torch.Tensor:
        sizes = self.check(*values)
        return values[0].new_empty([sizes[letter] for letter in self.result])

    def check(self, *values: object) -> dict[str, int]:
        """Sizes by letter. Raises ValueError where a rank, dtype or constant size contradicts the shapes."""
        sizes: dict[str, int] = {}
        for arg, value in zip(self.args, values, strict=False):
            assert isinstance(value, torch.Tensor)
            letters = arg.shape.rstrip("*")
            if value.dtype not in arg.dtypes:
                raise ValueError(f"{self.name}: {arg.name} is {value.dtype}, expected one of {arg.dtypes}")
            if arg.shape.endswith("*") and value.dim() == 1 and value.shape[0] == 0:
                continue
            if value.dim() != len(letters):
                raise ValueError(
                    f"{self.name}: {arg.name} has {value.dim()} dimensions, expected [{letters}]"
                )
            for letter, size in zip(letters, value.shape, strict=True):
                known = sizes.setdefault(letter, size)
                if isinstance(size, int) and isinstance(known, int) and size != known:
                    raise ValueError(f"{self.name}: {arg.name}'s {letter} is {size}, elsewhere {known}")
        return sizes
