"""A safetensors file, read in parts: nothing of it stays in memory, nor mapped."""

import json
import os
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hemiola.builder.formats.module import Stored
from hemiola.runtime.errors import Refused, one_line

DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip

KEYS = ("dtype", "shape", "data_offsets")
MAX_HEADER = 2**27  # bytes; safetensors reads less
MAX_SIZE = 2**56  # numbers of a tensor
OTHER_BRACKETS = 2**16  # of a header's metadata; an empty list takes thirty times its bytes


class Shard:
    """A file whose header safetensors has checked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                header_len = int.from_bytes(file.read(8), "little")
                text = file.read(min(header_len, MAX_HEADER))
                self._version = _version(file.fileno())
            num_brackets = text.count(b"[") + text.count(b"{")
            if num_brackets > 3 * text.count(b'"data_offsets"') + OTHER_BRACKETS:
                raise SafetensorError(f"its header has {num_brackets} brackets, more than tensors need")
            with safe_open(path, framework="pt"):
                header = json.loads(text)
            header.pop("__metadata__", None)
            if odd := [name for name, entry in header.items() if not _is_usual(entry)]:
                raise SafetensorError(f"{odd[0]} is described as no writer does")
            self._header = {name: {key: entry[key] for key in KEYS} for name, entry in header.items()}
        except (SafetensorError, OSError) as error:
            message = f"{path} is not a complete safetensors file ({one_line(error)})"
            raise Refused("damaged", message=message, way_out="download it again") from None
        self._first = 8 + header_len

    @property
    def names(self) -> Iterable[str]:
        return self._header.keys()

    def stored(self, name: str) -> Stored:
        """A tensor, of which nothing is read."""
        entry = self._header[name]
        shape = tuple(entry["shape"])

        def read(begin: int = 0, end: int | None = None, dim: int = 0) -> torch.Tensor:
            """dim: the first, or another one before which there are few places."""
            return self._read(name, shape, DTYPES[entry["dtype"]], begin, end, dim)

        return Stored(name, str(self._path), entry["dtype"], shape, read)

    def _read(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, begin: int, end: int | None, dim: int
    ) -> torch.Tensor:
        sizes = shape or (1,)
        num = sizes[dim]
        last = num if end is None else min(end, num)
        begin = min(begin, last)
        num_outer, inner = prod(sizes[:dim]), prod(sizes[dim + 1 :]) * dtype.itemsize
        content = torch.empty(num_outer, (last - begin) * inner, dtype=torch.uint8)
        place = self._first + self._header[name]["data_offsets"][0] + begin * inner
        parts = [content.view(-1)] if last - begin == num else list(content)
        try:
            with self._path.open("rb", buffering=0) as file:
                for number, part in enumerate(parts):
                    _fill(file.fileno(), part, place + number * num * inner)
                if _version(file.fileno()) != self._version:  # offsets are the other one's, or half is
                    raise EOFError("the file was changed during the build")
        except (OSError, EOFError) as error:
            message = f"{self._path}: cannot read {name} ({one_line(error)})"
            raise Refused("damaged", name, message=message, way_out="download it again") from None
        numbers = content.view(-1).view(dtype)
        return numbers.view(*sizes[:dim], last - begin, *sizes[dim + 1 :]) if shape else numbers.view(())


def _is_usual(entry: Any) -> bool:
    """safetensors reads tensors that are lists, dtypes that are objects, and sizes beside a zero that are no
    numbers of torch's."""
    if not isinstance(entry, dict) or not isinstance(entry["dtype"], str):
        return False
    return prod(max(size, 1) for size in entry["shape"]) < MAX_SIZE


def _version(file: int) -> tuple[int, int]:
    """Of an open file: another one that takes its place is younger."""
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns


def _fill(file: int, target: torch.Tensor, place: int) -> None:
    view, done = target.numpy().data, 0
    while done < len(view):
        num = os.preadv(file, [view[done:]], place + done)
        if not num:
            raise EOFError("the file ends before it")
        done += num
