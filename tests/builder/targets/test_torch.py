"""The default target: forms are chosen and weights packed once, when an engine is built."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import checkpoints
from safetensors.torch import load_file
from torch import nn
from torch.fx import Node

from hemiola.builder import graph, models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.models import Model
from hemiola.builder.targets import torch as target
from hemiola.plugins import OPS
from hemiola.plugins.spec import Call, Form, fp32_in_sixteens
from hemiola.runtime import manifest
from hemiola.runtime.device.program import load_program, store
from hemiola.runtime.errors import Refused
from hemiola.runtime.outline import Limits

LIMITS = Limits(max_len=64, max_rows=2, max_step_tokens=64, num_drafts=0, page_len=32, chunk_len=16)


def load(folder: Path, max_len: int = 64) -> Model:
    return models.load(Checkpoint(folder), torch.ops.hemiola, chunk_len=16, max_len=max_len)


def compiled(model: Model, folder: Path, limits: Limits = LIMITS) -> target.CompiledSegment:
    return target.compile(
        graph.export(model, "trunk", limits),
        model.weights(model.trunk),
        target.Job(folder, "cpu", ("cpu",), limits),
    )


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_every_op_of_every_family_runs_compiled(family: str, tiny_engine: Callable[..., Path]) -> None:
    """The tiny checkpoints have sizes that compiled forms take, so that what is tested is what users run."""
    for segment in manifest.load(tiny_engine(family)).segments:
        assert all(node.form == "compiled" and not node.refused for node in segment.nodes)
        linear = [node.sizes for node in segment.nodes if node.op == "linear"]
        assert linear and all(len(sizes) == 1 for sizes in linear), (
            "a dense layer needs its number of outputs"
        )


@pytest.mark.parametrize("name", ["trunk", "draft"])
def test_a_stored_program_is_the_exported_one(
    name: graph.Name, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    def known(node: Node) -> tuple | None:
        value = node.meta.get("val")
        sizes = [size if isinstance(size, int) else 0 for size in getattr(value, "shape", ())]
        return (value.dtype, sizes) if isinstance(value, torch.Tensor) else None

    exported = graph.export(load(tiny_checkpoint("nemotron_h_moe")), name, LIMITS).program.graph_module
    store(exported.graph, tmp_path / "program")
    stored = load_program(tmp_path / "program")
    assert stored.code.split() == exported.code.split()
    assert [*map(known, stored.graph.nodes)] == [*map(known, exported.graph.nodes)]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_weights_lie_in_the_layouts_that_forms_asked_for(
    family: str, tiny_checkpoint: Callable[..., Path], tiny_engine: Callable[..., Path]
) -> None:
    """Of bf16 and of fp32 checkpoints: what is packed is so, and nothing else is; all else is fp32."""
    engine_dir, model = tiny_engine(family), load(tiny_checkpoint(family), max_len=512)
    stored = load_file(engine_dir / "weights.safetensors")
    program = graph.export(model, "trunk", LIMITS)
    names = dict(zip(program.program.graph.nodes, program.weights, strict=False))
    packs = {}
    for node in program.program.graph.nodes:
        op = target.op_of(node)
        for arg, value in zip(op.args if op else (), node.args, strict=False):
            if value in names:
                packs[names[value]] = op.forms[0].packs.get(arg.name, torch.Tensor.float)
    assert len(set(packs.values())) >= 3 and packs.keys() == model.weights(model.trunk).keys()
    for name, lazy in model.weights(model.trunk).items():
        expected = packs[name](lazy.read())
        assert stored[name].dtype == expected.dtype and torch.equal(stored[name], expected), name
    halves = {name for name, tensor in stored.items() if tensor.dtype == torch.bfloat16}
    assert bool(halves) == (family in checkpoints.IN_BF16)


def test_the_first_form_that_takes_a_call_is_chosen_and_says_what_the_others_lack(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(call: Call) -> str:
        return "too wide" if call.sizes["O"] > 200 else ""

    forms = (
        Form("fast", "cpu", refuses, sizes="FO", options=("residual",)),
        Form("other", "cuda", lambda call: ""),
    )
    monkeypatch.setitem(OPS["linear"].__dict__, "forms", forms + OPS["linear"].forms)
    nodes = [
        node for node in compiled(load(tiny_checkpoint("qwen3_5")), tmp_path).nodes if node.op == "linear"
    ]
    assert {node.form for node in nodes} == {"fast", "compiled"}
    for node in nodes:
        wide = node.form == "compiled"
        assert node.refused == ({"fast": "too wide"} if wide else {}) and len(node.sizes) == (
            1 if wide else 2
        )
        assert (node.sizes[-1] > 200) == wide


def test_what_no_form_takes_is_refused_with_the_reason(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_checkpoint("nemotron_h_dense"))
    with pytest.raises(
        Refused,
        match=r"trunk, attention.* on cpu \(compiled: L is 24, no multiple of 16.*; use another page_len$",
    ):
        compiled(model, tmp_path, LIMITS.model_copy(update={"page_len": 24, "chunk_len": 8}))
    monkeypatch.setitem(OPS["embed"].__dict__, "forms", (Form("cuda", "cuda", fp32_in_sixteens("")),))
    with pytest.raises(
        Refused, match=r"embed cannot run on cpu .it has no form there.; use another checkpoint"
    ):
        compiled(model, tmp_path)


INEXACT = {
    "sigmoid": torch.sigmoid,
    "linear": lambda x: torch.nn.functional.linear(x, x.new_ones(64, 64)),
    "softmax": lambda x: x.softmax(1),
    "sum": lambda x: x / x.sum(1, keepdim=True),
    "exp2": torch.exp2,
}


@pytest.mark.parametrize("name", INEXACT)
def test_a_function_of_torch_whose_bits_depend_on_place_is_refused(
    name: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, step: object) -> torch.Tensor:
            return INEXACT[name](self.inner(x, step))

    model = load(tiny_checkpoint("nemotron_h_dense"))
    model.trunk.layers[1] = Wrapped(model.trunk.layers[1])
    with pytest.raises(Refused, match=r"the graph calls torch's .*, which may round by place; make it an op"):
        graph.export(model, "trunk", LIMITS)
