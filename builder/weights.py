"""Weights as they lie in an engine."""

import json
from pathlib import Path

import torch

from hemiola.builder.checkpoint import DTYPES
from hemiola.builder.lazy import PIECE, Lazy
from hemiola.runtime.progress import WRITING, Report

ALIGNMENT = 64  # bytes
STORED = {dtype: name for name, dtype in DTYPES.items()} | {torch.uint8: "U8"}


def write_weights(weights: dict[str, Lazy], path: Path, report: Report) -> None:
    """A safetensors file, a piece of a weight in memory at a time; whole cache lines first, which keep
    alignment."""
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
            begin = done
            for piece in lazy.pieces(PIECE):
                assert piece.shape[1:] == lazy.shape[1:] and piece.dtype == lazy.dtype
                file.write(piece.contiguous().view(-1).view(torch.uint8).numpy().data)
                done += piece.nbytes
                report(WRITING, done, offset)
            assert done - begin == lazy.nbytes
