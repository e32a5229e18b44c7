"""A program cut before its output head: the same numbers, and only those that somebody asks for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.segments import LIMITS, inputs_of
from torch._ops import OpOverload
from torch.fx import GraphModule

from hemiola.builder import models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.graph import Name, export
from hemiola.plugins import OPS
from hemiola.runtime.device.head import Best, Head, cut_head
from hemiola.runtime.device.session import Computed

Get = Callable[..., Path]


def load(tiny_checkpoint: Get, **options: Any) -> models.Model:
    sizes = {"chunk_len": LIMITS.chunk_len, "max_len": LIMITS.max_len}
    return models.load(Checkpoint(tiny_checkpoint("qwen3_5")), torch.ops.hemiola, **sizes, **options)


def called(program: GraphModule) -> list[object]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["trunk", "draft"])
def test_a_cut_program_tells_the_same(name: Name, dtype: torch.dtype, tiny_checkpoint: Get) -> None:
    model = load(tiny_checkpoint, tells_best=True, dtype=dtype)
    segment = model.trunk if name == "trunk" else model.draft
    assert segment is not None
    graph = export(model, name, LIMITS)
    given = inputs_of(graph, model.weights(segment))
    logits, hidden, best, token_id = graph.program.graph_module(*given)
    program = graph.program.graph_module
    for node in program.graph.nodes:  # as forms are bound
        if isinstance(node.target, OpOverload) and node.target in {op.torch_op for op in OPS.values()}:
            node.target = getattr(torch.ops.hemiola, node.target._overloadpacket.__name__)
    head = cut_head(program, given[: len(given) - len(graph.inputs)])
    assert head is not None and OPS["linear_argmax"].torch_op not in called(program)
    lines, same_hidden = program(*given)
    assert torch.equal(same_hidden, hidden) and lines.shape == (len(logits), hidden.shape[1])
    assert torch.equal(head.logits(lines), logits) and logits.dtype is torch.float32
    found = head.best(lines)
    assert torch.equal(found.logit, best) and torch.equal(found.token_id, token_id)
    assert torch.equal(token_id, logits.argmax(1))


def test_a_program_of_logits_alone_is_left_as_it_is(tiny_checkpoint: Get) -> None:
    graph = export(load(tiny_checkpoint), "trunk", LIMITS)
    before = called(graph.program.graph_module)
    assert cut_head(graph.program.graph_module, []) is None
    assert called(graph.program.graph_module) == before


def test_logits_are_computed_only_if_they_are_asked_for() -> None:
    asked: list[int] = []

    def logits(lines: torch.Tensor) -> torch.Tensor:
        asked.append(len(lines))
        return lines + 1

    head = Head(logits, lambda lines: Best(lines[:, 0], torch.arange(len(lines))))
    out = Computed(torch.zeros(5, 4), torch.zeros(9, 4), head)
    assert out.best is not None and out.best.token_id.tolist() == [*range(5)] and not asked
    part = out.first(2, 3)
    assert part.hidden.shape == (3, 4) and part.best is not None and len(part.best.logit) == 2
    found, hidden = part
    assert found.shape == (2, 4) and hidden.shape == (3, 4) and asked == [2]


def test_without_a_head_there_are_logits_alone() -> None:
    out = Computed(torch.ones(5, 7), torch.zeros(9, 4))
    assert out.best is None and out.first(2, 3).logits.shape == (2, 7) and out.logits.shape == (5, 7)


def test_what_is_moved_has_its_head_there_and_no_logits_of_its_own() -> None:
    """Graphs of prompts leave what they find in one place: lines for the head, not logits."""
    head = Head(lambda lines: 2 * lines, lambda lines: Best(lines[:, 0], torch.arange(len(lines))))
    out = Computed(torch.ones(2, 4), torch.full((3, 4), 5.0), head)
    there = out.room(7, 9)
    moved = out.moved(there)
    assert torch.equal(moved.logits, torch.full((2, 4), 2.0)) and torch.equal(moved.hidden, out.hidden)
    assert there.hidden.shape == (9, 4) and moved.hidden.data_ptr() == there.hidden.data_ptr()
    assert moved.best is not None and len(moved.best.token_id) == 2
