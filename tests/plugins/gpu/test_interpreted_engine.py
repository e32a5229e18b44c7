"""Models in fp32 as an engine for a GPU computes them, kernel by kernel in Triton's interpreter."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from kit import checkpoints
from kit.ops import int32, next_edge

from hemiola.builder import models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.graph import export
from hemiola.builder.targets.torch import choose_forms
from hemiola.runtime.device.session import bind_forms
from hemiola.runtime.manifest import Limits

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

LIMITS = Limits(max_len=64, max_rows=1, max_step_tokens=64, num_drafts=3, page_len=32, chunk_len=16)
CUTS = (14, 4, 5)  # within a chunk, over its edge, behind it


class Trunk:
    """A checkpoint's, with the forms of a GPU, on poisoned memory."""

    def __init__(self, checkpoint: Path) -> None:
        ops, sizes = torch.ops.hemiola, {"chunk_len": LIMITS.chunk_len, "max_len": LIMITS.max_len}
        model = models.load(Checkpoint(checkpoint), ops, dtype=torch.float32, **sizes)
        graph = export(model, "trunk", LIMITS)
        nodes, weights = choose_forms(graph, model.weights(model.trunk), "cuda")
        self._program = copy.deepcopy(graph.program.graph_module)
        bind_forms(self._program, cast(Any, SimpleNamespace(nodes=nodes, file="trunk")))
        self._bound = [weights[name].read() for name in graph.weights]
        self._bound += [torch.full((4, *state.shape), torch.nan) for state in graph.states]
        self._committed = self._edge = 0

    def step(self, tokens: list[int]) -> torch.Tensor:
        """Logits of the next tokens of the one request, in pages 3 and 1."""
        num, first = len(tokens), self._committed
        rows, places = int32([0, num, 0, 1, first, self._edge, 0, 0]), range(first, first + num)
        inputs = int32(*tokens), int32(*places), rows, int32([3, 1]), int32(*range(num))
        logits, hidden = self._program(*self._bound, *inputs)
        assert logits.dtype is hidden.dtype is torch.float32
        self._edge = next_edge(first, num, 0, LIMITS.chunk_len)
        self._committed += num
        return logits


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_next"])  # together they have every op
def test_logits_are_those_of_transformers(family: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    """Up to the order of sums; so are the greedy tokens."""
    model, trunk = checkpoints.reference(tiny_checkpoint(family)), Trunk(tiny_checkpoint(family))
    text = torch.randint(checkpoints.VOCAB, (sum(CUTS),), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(input_ids=text[None], use_cache=False).logits[0]
        found = torch.cat([trunk.step(part.tolist()) for part in text.split(list(CUTS))])
    assert (found - wanted).abs().max() < 2e-5 and torch.equal(found.argmax(1), wanted.argmax(1))
