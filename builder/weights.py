"""Weights as they lie in an engine."""

import json
from pathlib import Path

import torch

from hemiola.builder.checkpoint import DTYPES
from hemiola.builder.lazy import Lazy
from hemiola.builder.targets.torch import Report

ALIGNMENT = 64  # bytes
WRITING = "writing weights"  # the stage that is counted in bytes; others count calls and kernels
STORED = {dtype: name for name, dtype in DTYPES.items()} | {torch.uint8: "U8"}


def write_weights(weights: dict[str, Lazy], path: Path, report: Report) -> None:
    """A safetensors file, one tensor in memory at a time; whole cache lines first, which keep alignment."""
    ordered = sorted(weights.items(), key=lambda item: item[1].nbytes % ALIGNMENT != 0)
    header, offset = {}, 0
    for name, lazy in ordered:
        end = offset + lazy.nbytes
        header[name] = {
            "dtype": STORED[lazy.dtype],
            "shape": lazy.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, lazy in ordered:
            tensor = lazy.read().contiguous()
            assert tuple(tensor.shape) == lazy.shape and tensor.dtype == lazy.dtype
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
            done += lazy.nbytes
            report(WRITING, done, offset)
