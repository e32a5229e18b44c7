"""The default target: a segment is the exported program itself, run by torch."""

from pathlib import Path

import torch

from hemiola.builder.graph import Graph

ARCHS = ("cpu",)


def compile(graph: Graph, folder: Path) -> str:
    """Store the program without weights; returns the file's name."""
    file = f"{graph.name}.pt2"
    torch.export.save(graph.program, folder / file)
    return file
