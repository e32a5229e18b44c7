"""Dense layers with what follows them as one call: the same numbers before anything is rounded."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit.segments import LIMITS, inputs_of

from hemiola.builder import models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.cut import Cut
from hemiola.builder.graph import Graph, Name, export, op_of
from hemiola.builder.lazy import Lazy
from hemiola.builder.passes.fuse import fuse
from hemiola.plugins import OPS

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


def num_adding(graph: Graph) -> int:
    """Dense layers that add their outputs to something."""
    op = OPS["linear"]
    return len([n for n in graph.program.graph.nodes if op_of(n) is op and len(n.args) > len(op.args)])


@pytest.mark.parametrize("name", ["trunk", "draft"])
def test_a_fused_segment_computes_the_same(model: models.Model, name: Name) -> None:
    if name == "draft" and model.draft is None:
        pytest.skip("no head")
    graph, weights = segment(model, name)
    plain, before = computed(graph, weights), ops(graph)
    packed = fuse(graph, weights, "cuda")
    assert packed.keys() == weights.keys()
    for made, expected in zip(computed(graph, packed), plain, strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-9, atol=1e-9)
    logits, _, best, token_ids = plain
    assert torch.equal(token_ids, logits.argmax(1)) and torch.equal(best, logits.amax(1).float())
    after = ops(graph)
    sums = before["add"] - after["add"]
    gates = before["gate"] - after["gate"]
    squares = before["relu"] - after["relu"]
    assert num_adding(graph) == sums and after["linear_swiglu"] == gates and after["linear_relu2"] == squares
    assert before["linear"] - after["linear"] == gates + squares and sums + gates + squares > 0
    assert after["relu"] == after["chunk"] == 0


def test_only_what_routed_experts_end_in_is_still_added_alone(model: models.Model) -> None:
    graph, weights = segment(model, "trunk")
    fuse(graph, weights, "cuda")
    after = ops(graph)
    assert after["add"] <= 2 * after["moe"]


def gated(width: int, again: bool = False, biased: bool = False) -> Made:
    """SwiGLU behind a dense layer, whose weight another layer reads again, or which has a bias."""
    rng = torch.Generator().manual_seed(0)
    sizes = {"absent": (0,), "weight": (2 * width, 16), "bias": (2 * width,)}
    made = {name: torch.randn(size, generator=rng, dtype=torch.float64) for name, size in sizes.items()}

    class Layer(torch.nn.Module):
        def forward(
            self, absent: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            layer = torch.ops.hemiola.linear
            gates, values = layer(x, weight, bias if biased else absent).chunk(2, dim=1)
            opened = torch.ops.hemiola.gate(values, gates, "silu")
            return opened, layer(x, weight, absent) if again else x + 1

    x = torch.randn(3, 16, generator=rng, dtype=torch.float64)
    program = torch.export.export(Layer(), (*made.values(), x), strict=False)
    return Graph("trunk", program, tuple(sizes), (), ("x",)), {n: Lazy.of(t) for n, t in made.items()}


@pytest.mark.parametrize(
    ("given", "is_fused"),
    [
        ({"width": 16}, True),
        ({"width": 12}, False),
        ({"width": 16, "again": True}, False),
        ({"width": 16, "biased": True}, False),
    ],
    ids=str,
)
def test_gates_that_cannot_stand_by_eights_stay_where_they_are(given: dict, is_fused: bool) -> None:
    """Nor may those of a weight that somebody else reads as it was, or whose bias nobody puts in order."""
    graph, weights = gated(**given)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(own: dict[str, Lazy]) -> tuple[torch.Tensor, ...]:
        return graph.program.graph_module(*(own[name].read() for name in graph.weights), x)

    plain = run(weights)
    packed = fuse(graph, weights, "cuda")
    assert ops(graph)["linear_swiglu"] == is_fused
    for made, expected in zip(run(packed), plain, strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)


def test_a_sum_over_ranks_adds_the_residual(tiny_checkpoint: Get) -> None:
    """Two for each layer, which would be launches of torch's own. A sum in segments is rounded before."""
    checkpoint = Checkpoint(tiny_checkpoint("qwen3_5_divisible"))
    options = {"chunk_len": LIMITS.chunk_len, "max_len": LIMITS.max_len, "dtype": torch.bfloat16}
    for num_segments in (1, 8):
        cut = {"cut": Cut(2, 1), "num_segments": num_segments}
        model = models.load(checkpoint, torch.ops.hemiola, **cut, **options)
        graph, weights = segment(model, "trunk")
        before = ops(graph)
        fuse(graph, weights, "cuda")
        sums = [node for node in graph.program.graph.nodes if op_of(node) is OPS["sum"]]
        assert len(sums) == before["sum"] > 0
        assert {len(node.args) for node in sums} == ({3} if num_segments == 1 else {2})
        assert (ops(graph)["add"] == 0) == (num_segments == 1)
