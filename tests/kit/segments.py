"""A segment of an engine's program, called once."""

import torch

from hemiola.builder.graph import Graph
from hemiola.builder.lazy import Lazy
from hemiola.plugins.rows import COLUMNS
from hemiola.runtime.outline import Limits

LIMITS = Limits(max_len=64, max_rows=2, max_step_tokens=32, num_drafts=3, page_len=16, chunk_len=16)
NUM_TOKENS = 5


def inputs_of(graph: Graph, weights: dict[str, Lazy]) -> list[torch.Tensor]:
    """Weights, empty states, and a first step of one row."""
    rng = torch.Generator().manual_seed(0)
    row = dict.fromkeys(COLUMNS, 0) | {"num_tokens": NUM_TOKENS, "slot": 1}
    places = [node.meta["val"] for node in graph.program.graph.nodes if node.op == "placeholder"]
    inputs = {
        "token_ids": torch.randint(3, 40, (NUM_TOKENS,), generator=rng).int(),
        "positions": torch.arange(NUM_TOKENS).int(),
        "rows": torch.tensor([[row[name] for name in COLUMNS]]).int(),
        "page_table": torch.arange(1, 5).int().unsqueeze(0),
        "logits_ids": torch.tensor([1, 4]).int(),
    }
    if "hidden" in graph.inputs:
        like = places[-len(graph.inputs) + graph.inputs.index("hidden")]
        inputs["hidden"] = torch.randn(NUM_TOKENS, like.shape[1], generator=rng).to(like.dtype)
    bound = [weights[name].read().to(place.dtype) for name, place in zip(graph.weights, places, strict=False)]
    stores = [torch.zeros(6, *state.shape, dtype=getattr(torch, state.dtype)) for state in graph.states]
    return [*bound, *stores, *(inputs[name] for name in graph.inputs)]
