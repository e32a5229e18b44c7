"""A lowered program: the bits of the program run node by node, and a refusal of what no kernel computes."""

import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import harness as harnesses
from kit.checkpoints import FAMILIES
from kit.harness import Harness
from kit.ops import next_edge
from torch.fx import Graph, GraphModule, Node

from hemiola.plugins.cpu import moves
from hemiola.plugins.cpu.code import Recorder
from hemiola.plugins.sizes import FreeSize, evaluate
from hemiola.runtime.device import lower
from hemiola.runtime.device.program import load_program
from hemiola.runtime.device.session import LoadedSegment, bind_forms
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest_parts import Segment

Get = Callable[..., Path]
# Rows of (request, tokens, drafts) by step: prompts beside each other, decoding, drafts, an empty row.
STEPS = (
    ((0, 37, 0), (1, 5, 0)),
    ((0, 1, 0),),
    ((1, 4, 3), (0, 1, 0), (2, 90, 0)),
    ((2, 0, 0), (0, 3, 2)),
    ((0, 1, 0), (1, 1, 0), (2, 1, 0)),
    ((1, 17, 0),),
)


class NodeByNode:
    """The same program through torch, every op of ours as a call of its own."""

    def __init__(self, program: GraphModule, segment: Segment, bound: list, *_: bool) -> None:
        bind_forms(program, segment)
        self._call = partial(program, *bound)

    record = None  # of a CPU's step

    def room(self, size: int) -> int:
        return 0

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._call(*inputs)


def story(harness: Harness) -> list[torch.Tensor]:
    """Logits and hidden states of trunk and head over STEPS, then all that pages and slots hold."""
    requests, found = [harness.request() for _ in range(3)], []
    for seed, step in enumerate(STEPS):
        generator = torch.Generator().manual_seed(seed)
        rows = [
            (requests[n], torch.randint(3, 300, (size,), generator=generator).tolist(), drafts)
            for n, size, drafts in step
        ]
        starts = [request.committed for request, _, _ in rows]
        found += [*harness.step(rows), harness.hidden]
        if "draft" in harness.programs:
            found += harness.call("draft", rows, starts, harness.hidden)
    return found + list(harness.states.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_has_the_bits_of_its_program_run_node_by_node(
    family: str, tiny_engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory that is NaN wherever nothing was written since another result lay there."""
    ours = story(Harness(tiny_engine(family)))
    monkeypatch.setattr(lower, "Lowered", NodeByNode)
    for mine, wanted in zip(ours, story(Harness(tiny_engine(family))), strict=True):
        assert torch.equal(mine.nan_to_num(nan=7e30), wanted.nan_to_num(nan=7e30))


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_5"])
@pytest.mark.usefixtures("threads")
def test_a_steps_bits_do_not_depend_on_its_threads(
    family: str, tiny_engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though every call is shared, whatever it is worth."""
    shared = story(Harness(tiny_engine(family)))
    monkeypatch.setattr("hemiola.plugins.cpu.steps.WORTH_A_TEAM", -1)
    for mine, wanted in zip(story(Harness(tiny_engine(family))), shared, strict=True):
        assert torch.equal(mine.nan_to_num(nan=7e30), wanted.nan_to_num(nan=7e30))


@pytest.mark.parametrize("family", FAMILIES)
def test_lines_that_nobody_wants_are_not_computed_and_no_other_bit_changes(
    family: str, tiny_engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages and slots hold the same behind both; a line has its bits, whatever others are wanted."""
    engine_dir, found, costs = tiny_engine(family), [], []
    for every_line in (True, False):
        monkeypatch.setattr(harnesses, "LoadedSegment", partial(LoadedSegment, every_line=every_line))
        harness = Harness(engine_dir)
        request, parts = harness.request(), []
        for size, wanted in ((37, [36]), (5, [4, 0, 2]), (3, [])):
            tokens = torch.arange(5, 5 + size).tolist()
            rows, start = [(request, tokens, 0)], [request.committed]
            made = [harness.call("trunk", rows, start, wanted=wanted)]
            request.committed += size
            request.edge = next_edge(request.committed, 0, 0, harness.manifest.limits.chunk_len)
            if "draft" in harness.programs:
                given = torch.randn(size, made[0].hidden.shape[1], generator=torch.Generator().manual_seed(3))
                made.append(harness.call("draft", rows, start, given, wanted))
            for logits, hidden in made:
                parts += [logits, hidden[wanted] if len(hidden) > len(wanted) else hidden]
        found.append(parts + list(harness.states.values()))
        costs.append(_line_costs(harness.programs))
    for mine, expected in zip(*reversed(found), strict=True):
        assert torch.equal(mine.nan_to_num(nan=7e30), expected.nan_to_num(nan=7e30))
    (every, *_), (some, *_) = costs
    assert some < every, "less is computed per token"


def _line_costs(programs: dict[str, LoadedSegment]) -> list[int]:
    """What each program's calls are said to cost for 1,000 tokens of which one has logits."""
    sizes = {"T": 1000, "N": 1, "W": 70, "L": 1}
    return [
        sum(evaluate(call.nanoseconds, sizes) for call in program._call._step._calls)
        for program in programs.values()
    ]


def test_results_of_a_step_are_not_overwritten_by_the_next(tiny_engine: Get) -> None:
    """Steps in flight share nothing (runtime/step/table.py)."""
    harness = Harness(tiny_engine("qwen3_5"))
    first = harness.step([(request := harness.request(), [5, 6, 7], 0)])[0]
    kept = first.clone()
    harness.step([(request, [8, 9, 10], 0)])
    assert torch.equal(first, kept)


aten = torch.ops.aten


FOREIGN = {
    "calls torch's sigmoid, which no kernel computes": (aten.sigmoid.default, lambda x: (x,)),
    "calls torch's add, which": (aten.add.Scalar, lambda x: (x, 1), {"alpha": 2}),
    r"views .* as \[64, -1\], which would have to": (aten.view.default, lambda x: (x, [64, -1])),
    "turns torch.float32 into torch.float64": (aten.to.dtype, lambda x: (x, torch.float64)),
    "in dimension 0, not lines side by side": (aten.cat.default, lambda x: ([x, x], 0)),
    r"views .*64.* as \[-1, 32\], which would have to": (aten.view.default, lambda x: (x, [-1, 32])),
    "takes .* apart in dimension 0": (aten.split.Tensor, lambda x: (x, 1, 0)),
    "takes .* apart in dimension -1": (aten.chunk.default, lambda x: (x, 2, -1)),
    r"takes .*, 64\)? apart in dimension -1": (aten.unsqueeze.default, lambda x: (x, -1)),
    "calls torch's split with 2 arguments": (aten.split.Tensor, lambda x: (x, 1)),
    "calls torch's to with 3 arguments": (aten.to.dtype, lambda x: (x, torch.float32, True)),
    "calculates with 2": (aten.add.Tensor, lambda x: (x, 2)),
    "calculates with True": (aten.mul.Tensor, lambda x: (x, True)),
    "takes item 0 of one value": (operator.getitem, lambda x: (x, 0)),
}
# Of weights: kernels of moves read four bytes a number.
NARROW = {
    "relu": (aten.relu.default, lambda x: (x,)),
    "add": (aten.add.Tensor, lambda x: (x, x)),
    "mul": (aten.mul.Tensor, lambda x: (x, x)),
    "cat": (aten.cat.default, lambda x: ([x, x], 1)),
}


@pytest.mark.parametrize("reason", FOREIGN)
def test_what_no_kernel_computes_is_refused_by_name_when_an_engine_is_opened(
    reason: str, tiny_engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, args, *kwargs = FOREIGN[reason]

    def changed(path: Path) -> GraphModule:
        program = load_program(path)
        embed = next(node for node in program.graph.nodes if node.name == "embed")
        with program.graph.inserting_after(embed):
            program.graph.call_function(function, args(embed), *kwargs)
        return program

    monkeypatch.setattr("hemiola.runtime.device.session.load_program", changed)
    with pytest.raises(Refused, match=f"trunk.jsonl: .*{reason}.*; run build-engine again"):
        Harness(tiny_engine("qwen3_5"))


@pytest.mark.parametrize("called", NARROW)
@pytest.mark.parametrize(
    "weight",
    [torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(8, 16, dtype=torch.uint8), torch.ones(4, 4, 4)],
    ids=lambda weight: str(weight.dtype),
)
def test_a_move_reads_behind_a_weight_of_narrow_numbers(called: str, weight: torch.Tensor) -> None:
    """A process that opened such an engine ended by a signal."""
    graph = Graph()
    x = graph.placeholder("x")
    function, args = NARROW[called]
    graph.output((graph.call_function(function, args(x)),))
    segment = Segment(name="trunk", file="trunk.jsonl", weights=("w",), states=(), inputs=(), nodes=())
    lowering = lower._Lowering(segment, [weight], Recorder(), {})
    with pytest.raises(Refused, match=r"trunk.jsonl: .* kernels take one dimension of float32; run"):
        lowering.run(GraphModule(torch.nn.Module(), graph))


def lowered(make: Callable[[Graph, Node, Node], list[Node]]) -> Recorder:
    """A program of a weight [8, 16] and an input [T, 16]."""
    graph, code = Graph(), Recorder()
    weight, given = graph.placeholder("w"), graph.placeholder("a")
    graph.output(tuple(make(graph, weight, given)))
    segment = Segment(name="trunk", file="trunk.jsonl", weights=("w",), states=(), inputs=("a",), nodes=())
    inputs = {"a": code.input("a", (FreeSize("T"), 16), torch.float32)}
    program = GraphModule(torch.nn.Module(), graph)
    lower._Lowering(segment, [torch.ones(8, 16)], code, inputs).run(program)
    return code


def relu(graph: Graph, x: Node) -> Node:
    return graph.call_function(aten.relu.default, (x,))


def half(graph: Graph, x: Node) -> Node:
    parts = graph.call_function(aten.chunk.default, (relu(graph, x), 2, 1))
    return graph.call_function(operator.getitem, (parts, 0))


@pytest.mark.parametrize(
    "result",
    [lambda graph, w, a: [w], lambda graph, w, a: [a], lambda graph, w, a: [half(graph, a)]],
    ids=["a weight", "an input", "a part"],
)
def test_a_result_is_written_over_what_it_is_a_part_of(result: Callable) -> None:
    with pytest.raises(Refused, match="ends the program, but is a part of something else; run"):
        lowered(result)


def test_of_one_value_for_two_results_one_is_memory_that_nobody_wrote() -> None:
    with pytest.raises(Refused, match="output has one value for two results; run"):
        lowered(lambda graph, w, a: [relu(graph, a)] * 2)


SUM, PRODUCT, RELU, SQUARED = moves.SUM, moves.PRODUCT, moves.RELU, moves.SQUARED_RELU
MUL, ADD = aten.mul.Tensor, aten.add.Tensor
# What is made of a relu r of a, by calls of two values each, and which kernels then run.
SQUARES = {
    "a square": ([(MUL, "rr")], [SQUARED]),
    "a square and the relu": ([(MUL, "rr"), (ADD, "ra")], [RELU, PRODUCT, SUM]),
    "a product": ([(MUL, "ra")], [RELU, PRODUCT]),
    "a sum": ([(ADD, "rr")], [RELU, SUM]),
    "a square of what is no relu": ([(MUL, "aa"), (MUL, "rr")], [PRODUCT, SQUARED]),
}


@pytest.mark.parametrize("case", SQUARES)
def test_what_is_no_squared_relu_is_computed_as_one(case: str) -> None:
    calls, kernels = SQUARES[case]

    def make(graph: Graph, w: Node, a: Node) -> list[Node]:
        known = {"r": relu(graph, a), "a": a}
        return [graph.call_function(f, (known[x], known[y])) for f, (x, y) in calls]

    assert [call.arguments[2] for call in lowered(make).calls] == kernels


@pytest.mark.parametrize("function", [aten.add.Tensor, aten.mul.Tensor, aten.cat.default], ids=str)
def test_a_second_operand_of_narrow_numbers_is_read_like_the_first(function: Any) -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    args = ([x, y], 1) if function is aten.cat.default else (x, y)
    graph.output((graph.call_function(function, args),))
    segment = Segment(name="trunk", file="trunk.jsonl", weights=("w", "v"), states=(), inputs=(), nodes=())
    weights = [torch.ones(8, 16), torch.ones(8, 16, dtype=torch.bfloat16)]
    with pytest.raises(Refused, match="kernels take one dimension of float32"):
        lower._Lowering(segment, weights, Recorder(), {}).run(GraphModule(torch.nn.Module(), graph))


def test_numbers_of_a_token_that_lie_apart_are_a_traceback(
    tiny_engine: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(path: Path) -> GraphModule:
        program = load_program(path)
        call = next(node for node in program.graph.nodes if node.target is torch.ops.hemiola.rope.default)
        x, first = call.args[0], aten.view.default
        with program.graph.inserting_before(call):
            joined = program.graph.call_function(aten.cat.default, ([flat(program, x)] * 2, 1))
            wide = program.graph.call_function(first, (joined, [-1, x.meta["val"].shape[1], 32]))
            parts = program.graph.call_function(aten.split.Tensor, (wide, 16, 2))
            part = program.graph.call_function(operator.getitem, (parts, 0))
        call.args = (part, *call.args[1:])
        return program

    def flat(program: GraphModule, x: Node) -> Node:
        return program.graph.call_function(aten.view.default, (x, [-1, x.meta["val"].shape[1:].numel()]))

    monkeypatch.setattr("hemiola.runtime.device.session.load_program", changed)
    with pytest.raises(
        Refused, match=r"trunk.jsonl: rope\w* cannot run \(the numbers of a token, .*lie apart"
    ):
        Harness(tiny_engine("qwen3_5"))


def test_a_program_says_what_is_wrong_with_its_inputs_and_goes_on(tiny_engine: Get) -> None:
    harness = Harness(tiny_engine("qwen3_5"))
    request = harness.request()
    expected = harness.run([5, 6, 7])
    for tokens, slot, message in (([5, 400, 7], 1, "embed: id 400"), ([5, 6, 7], 99, "rows name slot 99")):
        request.slot = slot
        with pytest.raises(IndexError, match=message):
            harness.step([(request, tokens, 0)])
    request.slot = 1
    assert torch.equal(harness.step([(request, [5, 6, 7], 0)])[0], expected)
