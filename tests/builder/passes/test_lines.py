"""A program of lines that have logits: the numbers and the states of the program of all tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.segments import LIMITS, inputs_of
from torch.fx import GraphModule

from hemiola.builder import models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.graph import Name, export
from hemiola.builder.passes import copied
from hemiola.builder.passes.fuse import fuse
from hemiola.builder.passes.lines import only_lines


@pytest.mark.parametrize("name", ["trunk", "draft"])
@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_5"])
def test_a_line_has_the_bits_that_it_has_among_all_tokens(
    family: str, name: Name, tiny_checkpoint: Callable[[str], Path]
) -> None:
    sizes: Any = {"chunk_len": LIMITS.chunk_len, "max_len": LIMITS.max_len}
    model = models.load(Checkpoint(tiny_checkpoint(family)), torch.ops.hemiola, **sizes)
    segment = model.trunk if name == "trunk" else model.draft
    assert segment is not None
    graph = export(model, name, LIMITS)
    num_bound = len(graph.weights) + len(graph.states)
    plain, summed = copied(graph.program.graph), graph.program.graph
    weights = fuse(graph, model.weights(segment), "cpu")
    lines = copied(summed)
    only_lines(lines, num_bound)
    found = []
    for program in (plain, summed, lines):
        given = inputs_of(graph, weights)
        logits, hidden = GraphModule(torch.nn.Module(), program)(*given)
        ids = given[-1].long()
        found.append([logits, hidden if len(hidden) == len(ids) else hidden[ids], *given])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    selects = [node for node in lines.nodes if node.target is torch.ops.aten.index_select.default]
    results: Any = lines.output_node().args[0]
    assert selects and results[1] not in selects, "the last layer reads lines alone"
    assert len([node for node in summed.nodes if "add" in node.name]) < len(
        [node for node in plain.nodes if "add" in node.name]
    )
