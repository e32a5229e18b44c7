"""Segments as ONNX graphs: onnx's own checker and evaluator are the judges."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from kit import checkpoints, quantised
from kit.onnx_steps import Steps, evaluator

from hemiola.builder import graph, models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.dequantise import coded_weights, stored
from hemiola.builder.lazy import Lazy
from hemiola.builder.onnx import to_onnx, with_weights
from hemiola.builder.weights import write_weights
from hemiola.plugins import OPS
from hemiola.plugins.onnx import DOMAIN
from hemiola.runtime.errors import Refused
from hemiola.runtime.outline import Limits

Get = Callable[[str], Path]
LIMITS = Limits(max_len=96, max_rows=2, max_step_tokens=64, num_drafts=3, page_len=32, chunk_len=16)
# Of all steps together: numpy sums in another order, and where a half's sums are rounded on their way is
# the CPU's (1.2e-3 on an AMD EPYC, less than 1e-3 on Intel's).
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
EVERY_OP = ["nemotron_h_moe", "qwen3_5_moe"]  # between them
HALF = ["nemotron_h_dense", "qwen3_5_tied"]  # no experts: whoever is chosen on a tie changes all


def exported(folder: Path, name: graph.Name, dtype: torch.dtype) -> tuple[graph.Graph, Steps]:
    """The graph, and steps for it with the checkpoint's weights."""
    model = models.load(
        Checkpoint(folder), torch.ops.hemiola, chunk_len=16, max_len=LIMITS.max_len, dtype=dtype
    )
    made = graph.export(model, name, LIMITS)
    segment = model.trunk if name == "trunk" else model.draft
    assert segment is not None
    own, lazy = dict(segment.named_parameters()), model.weights(segment)
    weights = {key: lazy[key].read().to(own[key].dtype) for key in made.weights}
    return made, Steps(made, model, weights)


CASES = [(family, "trunk", torch.float32) for family in checkpoints.FAMILIES]
CASES += [(family, "draft", torch.float32) for family in EVERY_OP]
CASES += [(family, name, torch.float16) for family in HALF for name in ("trunk", "draft")]


@pytest.mark.parametrize(("family", "name", "dtype"), CASES)
def test_the_evaluator_gives_the_logits_of_the_torch_model(
    family: str, name: graph.Name, dtype: torch.dtype, tiny_checkpoint: Get
) -> None:
    """Over steps that carry states on: prompts, single tokens and rejected drafts of two rows."""
    made, steps = exported(tiny_checkpoint(family), name, dtype)
    model = to_onnx(made)
    onnx.checker.check_model(model, full_check=True)
    call, other = evaluator(model), Steps(made, steps.model, steps.weights)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # logits and hidden, step by step
    for inputs in steps.inputs():
        pairs += zip(other.onnx(call, inputs).values(), steps.torch(inputs), strict=True)
    for same in (pairs[::2], pairs[1::2]):
        value, expected = (torch.cat(part).float() for part in zip(*same, strict=True))
        assert (value - expected).norm() < TOLERANCE[dtype] * expected.norm()
        if dtype is torch.float32:
            assert torch.equal(value.argmax(1), expected.argmax(1))


INT4 = quantised.Recipe(
    quantised.compressed("pack-quantized", 4, "int", "group", 16),
    (quantised.NEVER, quantised.HEAD, (quantised.ALL, quantised.packed(4, 16))),
)
RECIPES = {name: quantised.RECIPES[name] for name in ("compressed_fp8", "modelopt_nvfp4")} | {"int4": INT4}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_evaluator_dequantises(recipe: str, tiny_checkpoint: Get, tmp_path: Path) -> None:
    """The logits of the torch model with the fp32 numbers that the codes stand for."""
    copies = quantised.quantise(tiny_checkpoint("qwen3_5"), tmp_path, RECIPES[recipe])
    made, steps = exported(copies.quantised, "trunk", torch.float32)
    lazy = steps.model.weights(steps.model.trunk)
    layouts = coded_weights(made, lazy)
    model = to_onnx(made, layouts)
    onnx.checker.check_model(model, full_check=True)
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    for name in layouts:
        for part, content in stored(name, lazy[name]).items():
            dims = [dim.dim_value for dim in inputs[part].shape.dim]
            raw = content.read().numpy().tobytes()
            model.graph.initializer.append(
                onnx.helper.make_tensor(part, inputs[part].elem_type, dims, raw, raw=True)
            )
    assert layouts and {node.op_type for node in model.graph.node} >= {"DequantizeLinear"}
    call, other = evaluator(model), Steps(made, steps.model, steps.weights)
    other.weights = {name: tensor for name, tensor in steps.weights.items() if name not in layouts}
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for given in steps.inputs():
        pairs += zip(other.onnx(call, given).values(), steps.torch(given), strict=True)
    for same in (pairs[::2], pairs[1::2]):
        value, expected = (torch.cat(part) for part in zip(*same, strict=True))
        assert (value - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", EVERY_OP)
def test_the_checker_takes_every_dtype_and_sizes_are_named(
    family: str, dtype: torch.dtype, tiny_checkpoint: Get
) -> None:
    made, _ = exported(tiny_checkpoint(family), "trunk", dtype)
    model = to_onnx(made)
    onnx.checker.check_model(model, full_check=True)
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in [*model.graph.input, *model.graph.output, *model.graph.value_info]
    }
    assert shapes["rows"] == ["rows", 8] and shapes["page_table"] == ["rows", "table"]
    assert shapes["token_ids"] == ["tokens"] and shapes["logits_ids"] == ["logits"]
    assert shapes["logits"][0] == "logits" and shapes["hidden"][0] == "tokens"
    for state in made.states:
        first = "pages" if state.kind == "page" else "slots"
        assert shapes[state.name] == [first, *state.shape] == shapes[f"{state.name}.next"]
    ours = [node for node in model.graph.node if node.domain == DOMAIN]
    calls = [
        node.target.__name__.split(".")[0]
        for node in made.program.graph.nodes
        if "hemiola" in str(node.target)
    ]
    assert [node.op_type for node in ours] == [name for name in calls if not OPS[name].has_onnx_body]
    for node in ours:  # the declaration: every argument, then results and what is updated in place
        op = OPS[node.op_type]
        assert len(node.input) == len(op.args)
        assert len(node.output) == len(op.results) + sum(arg.mutated for arg in op.args)


def test_a_wrong_attribute_of_our_nodes_fails_the_checker(tiny_checkpoint: Get) -> None:
    made, _ = exported(tiny_checkpoint("qwen3_5"), "trunk", torch.float32)
    model = to_onnx(made)
    node = next(node for node in model.graph.node if node.domain == DOMAIN)
    node.attribute.append(onnx.helper.make_attribute("chunks", 3))
    with pytest.raises(onnx.checker.ValidationError, match="chunks"):
        onnx.checker.check_model(model)


def test_weights_are_taken_from_the_file_of_the_engine(tiny_checkpoint: Get, tmp_path: Path) -> None:
    """By their names, at their places in the safetensors file; nothing is written twice."""
    made, steps = exported(tiny_checkpoint("qwen3_5_tied"), "trunk", torch.float32)
    write_weights({k: Lazy.of(v) for k, v in steps.weights.items()}, tmp_path / "weights.safetensors", print)
    model = with_weights(to_onnx(made), tmp_path / "weights.safetensors")
    (tmp_path / "trunk.onnx").write_bytes(model.SerializeToString())
    onnx.checker.check_model(tmp_path / "trunk.onnx", full_check=True)
    loaded = onnx.load(tmp_path / "trunk.onnx")
    for tensor in loaded.graph.initializer:
        if tensor.name in steps.weights:
            assert (onnx.numpy_helper.to_array(tensor) == steps.weights[tensor.name].numpy()).all()
    assert {v.name for v in model.graph.input} == {s.name for s in made.states} | {*made.inputs}


def test_what_has_no_onnx_form_is_refused_by_name(tiny_checkpoint: Get) -> None:
    made, _ = exported(tiny_checkpoint("qwen3_5"), "trunk", torch.float32)
    node = next(
        node for node in made.program.graph.nodes if "relu" in str(node.target) or "add" in str(node.target)
    )
    node.target = torch.ops.aten.sub.Tensor
    with pytest.raises(Refused, match=r"trunk: torch's sub has no ONNX form here"):
        to_onnx(made)
