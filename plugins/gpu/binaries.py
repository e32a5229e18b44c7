"""Compiled kernels as an engine keeps them."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hemiola.plugins.gpu.launch import Call


@dataclass(frozen=True)
class TensorMap:
    """How a kernel wants a tensor's boxes in shared memory; CUDA's numbers of swizzle and item."""

    swizzle: int
    item: int
    item_bytes: int
    box: tuple[int, ...]


@dataclass(frozen=True)
class Binary:
    """A cubin, and how it is launched."""

    call: Call
    symbol: str
    shared: int  # bytes
    threads: int
    maps: tuple[TensorMap, ...]  # of the arguments that are blocks
    waits: bool  # for the kernels before it (plugins/gpu/overlap.py)


@lru_cache
def sources() -> str:
    """sha256 of all plugins: a binary fits no other launcher than the one that it was compiled for."""
    plugins = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for file in sorted(plugins.rglob("*.py")):
        digest.update(f"{file.relative_to(plugins)}\n".encode() + file.read_bytes())
    return digest.hexdigest()
