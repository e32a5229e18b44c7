"""Dense layers with what follows them as one call: the same numbers before anything is rounded."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit.segments import LIMITS, inputs_of

from hemiola.builder import models
from hemiola.builder.checkpoint import Checkpoint, Lazy
from hemiola.builder.fuse import fuse
from hemiola.builder.graph import Graph, Name, export
from hemiola.builder.targets.torch import op_of

Get = Callable[..., Path]
Made = tuple[Graph, dict[str, Lazy]]


@pytest.fixture(params=["nemotron_h_moe", "nemotron_h_dense", "qwen3_next", "qwen3_5"])
def model(request: pytest.FixtureRequest, tiny_checkpoint: Get) -> models.Model:
    checkpoint = Checkpoint(tiny_checkpoint(request.param))
    options = {"chunk_len": LIMITS.chunk_len, "max_len": LIMITS.max_len}
    return models.load(checkpoint, torch.ops.hemiola, dtype=torch.float64, tells_best=True, **options)


def segment(model: models.Model, name: Name) -> Made:
    """Not fused."""
    module = model.trunk if name == "trunk" else model.draft
    assert module is not None
    return export(model, name, LIMITS), model.weights(module)


def computed(graph: Graph, weights: dict[str, Lazy]) -> tuple[torch.Tensor, ...]:
    """By the references."""
    return graph.program.graph_module(*inputs_of(graph, weights))


def ops(graph: Graph) -> Counter[str]:
    found = [
        op_of(node) or getattr(node.target, "_overloadpacket", None) for node in graph.program.graph.nodes
    ]
    return Counter(getattr(op, "name", None) or getattr(op, "__name__", "") for op in found if op)


@pytest.mark.parametrize("name", ["trunk", "draft"])
def test_a_fused_segment_computes_the_same(model: models.Model, name: Name) -> None:
    if name == "draft" and model.draft is None:
        pytest.skip("no head")
    graph, weights = segment(model, name)
    plain, before = computed(graph, weights), ops(graph)
    packed = fuse(graph, weights)
    assert packed.keys() == weights.keys()
    for made, expected in zip(computed(graph, packed), plain, strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-9, atol=1e-9)
    logits, _, best, token_ids = plain
    assert torch.equal(token_ids, logits.argmax(1)) and torch.equal(best, logits.amax(1).float())
    after = ops(graph)
    sums = before["add"] - after["add"]
    gates = before["gate"] - after["gate"]
    squares = before["relu"] - after["relu"]
    assert after["fused_linear"] == before["linear"] - after["linear"] == sums + gates + squares > 0
    assert after["relu"] == after["chunk"] == 0


def test_only_what_routed_experts_end_in_is_still_added_alone(model: models.Model) -> None:
    graph, weights = segment(model, "trunk")
    fuse(graph, weights)
    after = ops(graph)
    assert after["add"] <= 2 * after["moe"]
