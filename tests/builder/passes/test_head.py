"""A program cut before its output head: the same numbers, and the head apart."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.segments import LIMITS, inputs_of
from torch.fx import GraphModule

from hemiola.builder import models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.graph import Name, export
from hemiola.builder.passes import copied
from hemiola.builder.passes.head import cut_head
from hemiola.plugins import OPS
from hemiola.runtime.device.head import bind_head
from hemiola.runtime.manifest_parts import HeadCall

Get = Callable[..., Path]


def load(tiny_checkpoint: Get, **options: Any) -> models.Model:
    sizes = {"chunk_len": LIMITS.chunk_len, "max_len": LIMITS.max_len}
    return models.load(Checkpoint(tiny_checkpoint("qwen3_5")), torch.ops.hemiola, **sizes, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["trunk", "draft"])
def test_a_cut_program_computes_the_same(name: Name, dtype: torch.dtype, tiny_checkpoint: Get) -> None:
    model = load(tiny_checkpoint, tells_best=True, dtype=dtype)
    segment = model.trunk if name == "trunk" else model.draft
    assert segment is not None
    graph = export(model, name, LIMITS)
    given = inputs_of(graph, model.weights(segment))
    logits, hidden, best, token_id = graph.program.graph_module(*given)
    program = copied(graph.program.graph)
    of_logits, of_best = cut_head(program, graph.weights)
    called = [node.target for node in program.nodes if node.op == "call_function"]
    assert OPS["linear_argmax"].torch_op not in called and of_logits == of_best
    lines, same_hidden = GraphModule(torch.nn.Module(), program)(*given)
    assert torch.equal(same_hidden, hidden) and lines.shape == (len(logits), hidden.shape[1])
    weights = dict(zip(graph.weights, given, strict=False))
    forms = [
        HeadCall(op=op, form="reference", refused={}, sizes=(), weights=own)
        for op, own in (("linear", of_logits), ("linear_argmax", of_best))
    ]
    own: Any = SimpleNamespace(head=forms, layouts={})
    head = bind_head(own, weights)
    assert head is not None
    assert torch.equal(head.logits(lines), logits) and logits.dtype is torch.float32
    found = head.best(lines)
    assert torch.equal(found.logit, best) and torch.equal(found.token_id, token_id)
    assert torch.equal(token_id, logits.argmax(1))


def test_a_program_of_logits_alone_is_left_as_it_is(tiny_checkpoint: Get) -> None:
    graph = export(load(tiny_checkpoint), "trunk", LIMITS).program.graph
    before = str(graph)
    assert cut_head(graph, []) == () and str(graph) == before
