"""Our ops and their kernels as plugins, before the real plugin registry and module of TensorRT 11.4 (its lean
runtime).

TensorRT itself has not run them: its libraries are not here.
"""

import ctypes
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from kit import tensorrt_bindings
from kit.ops import AHEAD
from torch.fx import Node

from hemiola.builder import graph, models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.graph import op_of
from hemiola.builder.targets.trt import registry
from hemiola.plugins import OPS
from hemiola.plugins.spec import Form, FormChoice, Op
from hemiola.runtime.device.segments import tensorrt_ops as plugins
from hemiola.runtime.outline import Limits

NEWEST = "11.4.0.106"
OURS = sorted(op.name for op in OPS.values() if op.runs_on("cuda") and not (op.has_onnx_body or op.exchanges))
LIMITS = Limits(max_len=96, max_rows=2, max_step_tokens=64, num_drafts=3, page_len=32, chunk_len=16)
pytestmark = pytest.mark.skipif(
    not (tensorrt_bindings.ROOT / NEWEST / "done").is_file(), reason=tensorrt_bindings.MISSING
)


@pytest.fixture(scope="module")
def trt() -> Iterator[Any]:
    before = sys.path.copy()
    loaded = tensorrt_bindings.load(NEWEST)
    plugins.register()
    sys.modules[loaded.plugin.SymInt32.__module__].SymExprImpl.expr = None  # its own wants a capsule
    yield loaded
    sys.path[:] = before
    del sys.modules["tensorrt"], sys.modules["tensorrt.plugin"]


@pytest.fixture(scope="module")
def calls(tiny_checkpoint: Callable[[str], Path]) -> dict[str, Node]:
    """By op, a call of it in a real graph."""
    found: dict[str, Node] = {}
    for family in ("nemotron_h_moe", "qwen3_5"):
        model = models.load(
            Checkpoint(tiny_checkpoint(family)), torch.ops.hemiola, chunk_len=16, max_len=LIMITS.max_len
        )
        for node in graph.export(model, "trunk", LIMITS).program.graph.nodes:
            if (op := op_of(node)) is not None and op.name in OURS:
                found.setdefault(op.name, node)
    assert sorted(found) == OURS
    return found


class Expression:
    """A size, of which TensorRT's own class cannot be made in Python."""

    def __init__(self, size: Any) -> None:
        self.size = size


class Expressions:
    """Their builder. TensorRT's module copies a size by adding zero."""

    KINDS: ClassVar = {
        "SUM": operator.add, "SUB": operator.sub, "PROD": operator.mul, "FLOOR_DIV": operator.floordiv,
        "CEIL_DIV": lambda a, b: -(-a // b),
    }  # fmt: skip
    constant = staticmethod(Expression)

    @classmethod
    def operation(cls, kind: Any, one: Expression, other: Expression) -> Expression:
        return Expression(cls.KINDS[kind.name](one.size, other.size))


def made(trt: Any, node: Node) -> Any:
    """The plugin that TensorRT's parser would make of the node, from its attributes as fields."""
    op = op_of(node)
    assert op is not None
    creator = trt.get_plugin_registry().get_creator(op.name, "1", "hemiola")
    fields = [
        trt.PluginField(attr.name, value.encode(), trt.PluginFieldType.CHAR)
        if isinstance(value := attr.type(given), str)
        else trt.PluginField(attr.name, np.array([value]), trtype(trt, attr.type))
        for attr, given in zip(op.attrs, node.args[len(op.args) :], strict=True)
    ]
    return creator.create_plugin(
        op.name,
        "hemiola",
        trt.PluginFieldCollection(fields),
        trt.TensorRTPhase.BUILD,
        trt.QuickPluginCreationRequest.PREFER_JIT,
    )


def trtype(trt: Any, kind: type) -> Any:
    names = {int: "INT64", float: "FLOAT64", bool: "INT32"}
    return getattr(trt.PluginFieldType, names[kind])


def dtypes(trt: Any, values: Any) -> list[Any]:
    names = {dtype: getattr(trt.DataType, name) for name, dtype in plugins.DTYPES.items()}
    return [names[value.dtype] for value in values]


@pytest.mark.parametrize("name", OURS)
def test_the_registry_has_a_creator_with_the_attributes_of_the_declaration(name: str, trt: Any) -> None:
    creator = trt.get_plugin_registry().get_creator(name, "1", "hemiola")
    assert creator is not None and creator.plugin_namespace == "hemiola"
    assert [field.name for field in creator.field_names] == [attr.name for attr in OPS[name].attrs]


@pytest.mark.parametrize("name", OURS)
def test_results_and_states_are_those_of_the_torch_op(
    name: str, trt: Any, calls: dict[str, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dtypes, shapes, and that every state comes out where it came in."""
    node, op = calls[name], OPS[name]
    values = [arg.meta["val"] for arg in node.args[: len(op.args)]]  # pyright: ignore[reportAttributeAccessIssue]
    results = node.meta["val"]
    results = list(results) if isinstance(results, tuple) else [results]
    mutated = [i for i, arg in enumerate(op.args) if arg.mutated]
    plugin = made(trt, node)
    found = plugin.get_output_data_types(dtypes(trt, values), [value.dim() for value in values])
    assert plugin.get_num_outputs() == len(found) == len(results) + len(mutated)
    assert list(found) == dtypes(trt, [*results, *(values[i] for i in mutated)])
    aliases = [plugin.get_aliased_input(i) for i in range(len(found))]
    assert aliases == [-1] * len(results) + mutated
    monkeypatch.setattr(trt, "IDimensionExpr", Expression)
    monkeypatch.setattr(trt, "DimsExprs", lambda length: [None] * length)
    shapes = [[Expression(size) for size in value.shape] for value in values]
    outputs = plugin.get_output_shapes(shapes, [], Expressions)
    expected = [list(value.shape) for value in [*results, *(values[i] for i in mutated)]]
    assert [[expression.size for expression in shape] for shape in outputs] == expected


def on_the_host(value: Any) -> torch.Tensor:
    """TensorRT's tensor, whose address is of the host's memory here."""
    dtype, shape = plugins.DTYPES[value.dtype.name], tuple(value.shape)
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = (ctypes.c_char * max(size, 1)).from_address(value.data_ptr)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size].view(dtype).view(shape)


ROWS = torch.tensor([[0, 4, 0, 1, 0, 0, 0, 0], [4, 3, 1, 2, 17, 16, 0, 0]], dtype=torch.int32)
SIZES = {"T": 7, "N": 2, "W": 3, "Z": 7, "S": 3}


@pytest.mark.parametrize("name", OURS)
def test_an_execution_is_the_op(
    name: str, trt: Any, calls: dict[str, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments in their order at their addresses, results where they are wanted, states in place."""
    monkeypatch.setattr(plugins, "_tensor", on_the_host)
    monkeypatch.setattr(plugins, "_on", lambda stream, device: nullcontext())
    reference = FormChoice(Form("reference", "cpu", lambda call: ""), {})
    monkeypatch.setattr(Op, "choose", lambda self, call, device: reference)
    node, op = calls[name], OPS[name]
    dice, values = torch.Generator().manual_seed(3), []
    for arg, given in zip(op.args, node.args, strict=False):
        like = given.meta["val"]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
        letters = arg.shape.rstrip("*")
        shape = [SIZES.get(letters[i], size) for i, size in enumerate(like.shape)]
        value = torch.randn(shape, generator=dice) if like.is_floating_point() else torch.zeros(shape)
        values.append(value.to(like.dtype))
        if arg.name == "rows":
            values[-1] = ROWS.clone()
        elif arg.name == "positions":
            values[-1] = torch.tensor([0, 1, 2, 3, 17, 18, 19], dtype=torch.int32)
        elif arg.name == "page_table":
            values[-1] = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
        elif arg.name == "expert_ids":
            values[-1] = torch.arange(7 * shape[1], dtype=torch.int32).view(7, -1) % 5
        elif arg.name == "A":
            values[-1] = -values[-1].abs()
    attrs = node.args[len(op.args) :]
    same = [value.clone() for value in values]
    results = op.reference(*same, *attrs)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    states = [i for i, arg in enumerate(op.args) if arg.mutated]
    outputs = [torch.full_like(result, -77) for result in results] + [values[i] for i in states]
    plugin = made(trt, node)
    plugin.get_output_data_types(dtypes(trt, values), [value.dim() for value in values])
    plugin.enqueue(
        [described(trt, value) for value in values],
        [described(trt, value) for value in outputs],
        [value.data_ptr() or outputs[0].data_ptr() for value in values],
        [value.data_ptr() for value in outputs],
        [value.stride() for value in values],
        [value.stride() for value in outputs],
        0,
    )
    for found, expected in zip(outputs, results, strict=False):
        assert torch.equal(found, expected)
    for i in states:
        assert torch.equal(values[i], same[i]), op.args[i].name


def described(trt: Any, value: torch.Tensor) -> Any:
    desc = trt.PluginTensorDesc()
    (desc.type,) = dtypes(trt, [value])
    desc.dims, desc.format = trt.Dims(list(value.shape)), trt.TensorFormat.LINEAR
    return desc


class Told(list):
    """Takes the ints of a launch."""

    nbSymExprs: int  # noqa: N815

    def __setitem__(self, index: Any, value: Any) -> None:
        assert index == len(self) < self.nbSymExprs
        self.append(value)


@pytest.mark.parametrize("name", OURS)
def test_a_kernel_is_told_ahead_of_time_as_it_is_launched(
    name: str, trt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Creator without fields, dtypes, shapes, what comes out where it came in, tactic, grid, ints and PTX."""
    pytest.importorskip("triton", reason="needs Triton")
    kit, ptx = import_module("kit.ahead"), import_module("hemiola.builder.targets.trt.ptx")
    monkeypatch.setattr(trt, "IDimensionExpr", Expression)
    monkeypatch.setattr(trt, "DimsExprs", lambda length: [None] * length)
    own = AHEAD[name]
    values = kit.as_on_a_gpu(own.op, own.arguments(20))
    given, sizes = kit.sized(own.op, values), kit.sizes_of(own.op, values)
    told = ptx.ahead(own.op, given, values[len(own.op.args) :], kit.Gpu(90, 132))
    registry.register_kernels(told.entries, told.plan.memory)
    launches, _ = kit.played(own.op, told, values)
    for entry, launch in zip(told.entries, launches, strict=True):
        creator = trt.get_plugin_registry().get_creator(entry.name, "1", "hemiola")
        assert creator is not None and len(creator.field_names) == 0
        memory = [told.plan.memory[own] for own in (*entry.inputs, *entry.outputs)]
        types = dtypes(trt, memory)
        shapes = [[kit.evaluate(size, sizes) for size in own.shape] for own in memory]
        count = len(entry.inputs)
        plugin = creator.create_plugin(
            entry.name, "hemiola", trt.PluginFieldCollection([]), trt.TensorRTPhase.BUILD,
            trt.QuickPluginCreationRequest.STRICT_AOT,
        )  # fmt: skip
        assert plugin.get_num_outputs() == len(entry.outputs)
        found = plugin.get_output_data_types(types[:count], [len(shape) for shape in shapes[:count]])
        assert list(found) == types[count:]
        aliases = [plugin.get_aliased_input(i) for i in range(len(entry.outputs))]
        assert aliases == [entry.inputs.index(own) if own in entry.inputs else -1 for own in entry.outputs]
        inputs = [[Expression(size) for size in shape] for shape in shapes[:count]]
        outputs = plugin.get_output_shapes(inputs, [], Expressions)
        assert [[size.size for size in shape] for shape in outputs] == shapes[count:]
        both = [dynamic(trt, kind, shape) for kind, shape in zip(types, shapes, strict=True)]
        plugin.configure_plugin(both[:count], both[count:])
        combinations = plugin.get_supported_format_combinations(both, count)
        assert [desc.type for desc in combinations] == types
        assert {desc.format for desc in combinations} == {trt.TensorFormat.LINEAR}
        plugin.configure_plugin(both[:count], both[count:])
        assert plugin.get_valid_tactics() == []  # one plan for steps of any size
        plugin.set_tactic(0)
        params, ints = SimpleNamespace(), Told()
        plugin.get_launch_params(inputs, both, count, params, ints, Expressions)
        grid = tuple(getattr(params, f"grid_{axis}").expr.size for axis in "xyz")
        block = [getattr(params, f"block_{axis}").expr.size for axis in "xyz"]
        assert grid == launch.grid and block == [entry.threads, 1, 1]
        assert params.shared_mem.expr.size == entry.shared
        assert [value.expr.size for value in ints] == list(launch.values[count : count + len(entry.ints)])
        symbol, ptx = plugin.get_kernel([b.desc for b in both[:count]], [b.desc for b in both[count:]])
        assert symbol == entry.name and ptx == entry.ptx.encode()
        assert len(launch.values) == count + ints.nbSymExprs + len(entry.outputs)


def dynamic(trt: Any, kind: Any, shape: list[int]) -> Any:
    desc = trt.DynamicPluginTensorDesc()
    own = trt.PluginTensorDesc()
    own.type, own.dims, own.format = kind, trt.Dims(shape), trt.TensorFormat.LINEAR
    desc.desc, desc.min, desc.max, desc.opt = own, trt.Dims(shape), trt.Dims(shape), trt.Dims(shape)
    return desc
