"""Models in fp32 as an engine for a GPU computes them, kernel by kernel in Triton's interpreter."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from kit import checkpoints, quantised
from kit.harness import Harness
from kit.ops import int32, next_edge, rel_error

from hemiola.builder import models
from hemiola.builder.build import build
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.graph import export
from hemiola.builder.options import Options
from hemiola.builder.passes.fuse import fuse
from hemiola.builder.targets.torch import choose_forms
from hemiola.runtime.device.session import bind_forms
from hemiola.runtime.outline import Limits
from tests.runtime.engine.test_narrow_inputs import W8A8

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

LIMITS = Limits(max_len=64, max_rows=1, max_step_tokens=64, num_drafts=3, page_len=32, chunk_len=16)
CUTS = (14, 4, 5)  # within a chunk, over its edge, behind it


class Trunk:
    """A checkpoint's, with the forms of a GPU, on poisoned memory."""

    def __init__(self, checkpoint: Path, narrow_inputs: bool = False) -> None:
        ops, sizes = torch.ops.hemiola, {"chunk_len": LIMITS.chunk_len, "max_len": LIMITS.max_len}
        opened = Checkpoint(checkpoint, narrow_inputs=narrow_inputs)
        model = models.load(opened, ops, dtype=torch.float32, **sizes)
        graph = export(model, "trunk", LIMITS)
        own = fuse(graph, model.weights(model.trunk), "cuda")
        nodes, weights = choose_forms(graph, own, "cuda")
        self._program = copy.deepcopy(graph.program.graph_module)
        layouts = {name: str(lazy.layout) for name, lazy in own.items() if lazy.layout}
        chosen = {"nodes": nodes, "file": "trunk", "layouts": layouts, "weights": graph.weights}
        bind_forms(self._program, cast(Any, SimpleNamespace(**chosen)))
        self._bound = [weights[name].read().clone() for name in graph.weights]
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


@pytest.mark.parametrize("recipe, family", [("awq", "qwen3_next"), ("modelopt_nvfp4", "nemotron_h_moe")])
def test_logits_of_quantised_weights_are_those_of_the_same_numbers(
    recipe: str, family: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Up to the interpreter's sums, which are those of tiles."""
    copies = quantised.quantise(tiny_checkpoint(family), tmp_path, quantised.RECIPES[recipe])
    ours, theirs = Trunk(copies.quantised), Trunk(copies.twin)
    found, wanted = ours.step([5, 9, 2, 7]), theirs.step([5, 9, 2, 7])
    assert (found - wanted).abs().max() < 2e-5 < wanted.abs().max()


@pytest.mark.parametrize("by, family", [("static", "qwen3_5_moe_experts")])
def test_logits_of_inputs_in_e4m3_are_those_of_a_cpu(
    by: str, family: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """But for another order of sums, and codes that it makes the next ones."""
    copies = quantised.quantise(tiny_checkpoint(family), tmp_path, W8A8[by])
    build(copies.quantised, tmp_path / "engine", Options(act_dtype="fp8", max_len=64, page_len=32))
    ours, theirs, tokens = Trunk(copies.quantised, True), Harness(tmp_path / "engine"), [5, 9, 2, 7]
    wide = Trunk(copies.quantised).step(tokens)
    found, wanted = ours.step(tokens), theirs.run(tokens)
    assert rel_error(found, wanted) < 2e-3 < rel_error(wide, wanted)
