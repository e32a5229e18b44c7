"""The cut of a graph: every node once, equal layers one part, and views left to the runtime."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from kit import checkpoints

from hemiola.builder import graph, models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.onnx import outputs, to_onnx
from hemiola.builder.passes.cut import Partition, cut
from hemiola.plugins.onnx import DOMAIN
from hemiola.runtime.outline import Limits

Get = Callable[[str], Path]
LIMITS = Limits(max_len=96, max_rows=2, max_step_tokens=64, num_drafts=3, page_len=32, chunk_len=16)


def partition(folder: Path, name: graph.Name = "trunk") -> tuple[graph.Graph, onnx.ModelProto, Partition]:
    model = models.load(
        Checkpoint(folder), torch.ops.hemiola, chunk_len=16, max_len=LIMITS.max_len, dtype=torch.bfloat16
    )
    made = graph.export(model, name, LIMITS)
    whole = to_onnx(made)
    return made, whole, cut(whole, made.weights)


CASES = [(family, "trunk") for family in checkpoints.FAMILIES]
CASES += [("nemotron_h_moe", "draft"), ("qwen3_next", "draft")]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_every_node_is_in_one_piece_and_reads_what_is_there(
    family: str, name: graph.Name, tiny_checkpoint: Get
) -> None:
    made, whole, (pieces, parts) = partition(tiny_checkpoint(family), name)
    nodes = Counter(node.op_type for node in whole.graph.node)
    found = Counter(piece.name for piece in pieces if piece.kind == "op")
    found += Counter(
        {"view": "Reshape", "split": "Split", "unsqueeze": "Unsqueeze"}[piece.name]
        for piece in pieces
        if piece.kind == "view"
    )
    for piece in pieces:
        if piece.kind == "part":
            part = parts[piece.name]
            onnx.checker.check_model(part, full_check=True)
            assert not any(node.domain == DOMAIN for node in part.graph.node)
            assert not any(node.name for node in part.graph.node)
            found += Counter(node.op_type for node in part.graph.node)
            assert len(part.graph.input) == len(piece.inputs) and len(part.graph.output) == len(piece.outputs)
    assert found == nodes
    known = {*made.weights, *(state.name for state in made.states), *made.inputs}
    for piece in pieces:
        assert known >= set(piece.inputs), f"{piece.name} reads what nobody has made yet"
        assert not known & set(piece.outputs), f"{piece.name} makes what is there"
        known |= set(piece.outputs)
    assert known >= set(outputs(made))


def test_parts_are_as_many_as_there_are_recurrences_and_experts_between(tiny_checkpoint: Get) -> None:
    """A part begins behind each conv, recurrence, attention or mixture: not at every op."""
    _, _, (pieces, parts) = partition(tiny_checkpoint("qwen3_5"))
    kinds = [piece.name if piece.kind == "op" else piece.kind for piece in pieces if piece.kind != "view"]
    delta = ["part", "conv", "part", "delta"]
    assert kinds == [*delta, *delta, "part", "attention", *delta, "part"]
    assert len(parts) == 6 < kinds.count("part") == 8  # equal layers between equal ones share theirs


def test_layers_of_other_shapes_do_not_share(tiny_checkpoint: Get, tmp_path: Path) -> None:
    """Parts are known by content: another width is another part, another weight is not."""
    one, same = (
        partition(checkpoints.make("qwen3_5", tmp_path / str(seed), seed=seed))[2].parts for seed in (1, 2)
    )
    other = partition(tiny_checkpoint("qwen3_5_tied"))[2].parts
    assert one.keys() == same.keys() and not one.keys() & other.keys()
    for digest, part in one.items():
        assert part.SerializeToString(deterministic=True) == same[digest].SerializeToString(
            deterministic=True
        )


def test_views_that_only_our_ops_read_move_nothing(tiny_checkpoint: Get) -> None:
    """Mamba2 reads its inputs in the conv's output; nothing is compiled between the two."""
    pieces, _ = partition(tiny_checkpoint("nemotron_h_dense"))[2]
    kinds = [piece.name if piece.kind != "part" else "part" for piece in pieces]
    assert kinds[:7] == ["part", "conv", "split", "view", "view", "view", "mamba2"]
