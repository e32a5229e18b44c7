"""Engines for a GPU, built without one: dtypes of all that they hold, forms, and what is refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.fx import Node

from hemiola.builder.graph import op_of
from hemiola.runtime import manifest
from hemiola.runtime.arch import ARCHS
from hemiola.runtime.device.program import load_program

Get = Callable[..., Path]
GPUS = [name for name, arch in ARCHS.items() if arch.device == "cuda"]
WIDE_STATES = (".state", ".dt_records", ".g_records", ".beta_records")
WIDE_WEIGHTS = ("norm.weight", ".A", ".D", ".dt_bias", ".choice_bias", ".table", "absent")


def test_the_table_has_the_architectures_that_are_promised() -> None:
    assert list(ARCHS) == ["cpu", *GPUS] and ARCHS["cpu"].capability is None
    assert GPUS == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121"]
    for name in GPUS:
        major, minor = ARCHS[name].capability or (0, 0)
        assert name == f"sm_{major}{minor}" and ARCHS[name].dtype == "bfloat16"


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_next", "qwen3_5_tied"])
def test_an_engine_for_a_gpu_is_bf16_but_for_what_sums_and_decays(family: str, tiny_engine: Get) -> None:
    engine_dir = tiny_engine(family, arch="sm_90")
    found = manifest.load(engine_dir)
    assert found.arch == "sm_90" and {n.form for s in found.segments for n in s.nodes} == {"cuda"}
    for state in found.states:
        wide = state.kind == "slot" and state.name.endswith(WIDE_STATES)
        assert state.dtype == ("float32" if wide else "bfloat16"), state
    for name, tensor in load_file(engine_dir / found.weights_file).items():
        wide = name.endswith(WIDE_WEIGHTS)
        assert tensor.dtype is (torch.float32 if wide else torch.bfloat16), name


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_next", "qwen3_5_tied"])
def test_an_engine_in_fp32_has_nothing_narrow(family: str, tiny_engine: Get) -> None:
    engine_dir = tiny_engine(family, arch="sm_90", dtype="float32")
    found = manifest.load(engine_dir)
    assert found.arch == "sm_90" and {n.form for s in found.segments for n in s.nodes} == {"cuda"}
    assert {state.dtype for state in found.states} == {"float32"}
    assert {t.dtype for t in load_file(engine_dir / found.weights_file).values()} == {torch.float32}
    for segment in found.segments:
        values = [node.meta.get("val") for node in load_program(engine_dir / segment.file).graph.nodes]
        floats = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()}
        assert floats == {torch.float32}
    kinds = {kind for own in found.kernels for entry in own.binaries for kind in entry.binary.call.kinds}
    assert not any("bf16" in kind for kind in kinds)


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_next"])
def test_only_logits_and_routes_are_wide_between_ops(family: str, tiny_engine: Get) -> None:
    """An fp32 number that slipped into the graph would double its traffic, and nobody would see it."""
    for segment in manifest.load(tiny_engine(family, arch="sm_90")).segments:
        graph = load_program(tiny_engine(family, arch="sm_90") / segment.file).graph
        for node in graph.nodes:
            value = node.meta.get("val")
            if (
                node.op == "call_function"
                and isinstance(value, torch.Tensor)
                and value.dtype is torch.float32
            ):
                assert "to" in str(node.target) or _comes_from(node, "route", "linear_argmax"), node
        given = [node.meta["val"].dtype for node in graph.output_node().args[0]]
        assert given == [torch.bfloat16, torch.bfloat16], "lines that choose, and hidden states"


def _comes_from(node: Node, *ops: str) -> bool:
    source = node.args[0]
    found = op_of(source) if isinstance(source, Node) else None
    return found is not None and found.name in ops


def test_one_numerics_for_all_gpus(tiny_engine: Get) -> None:
    """What differs between architectures is where an engine may be opened."""
    one, other = (manifest.load(tiny_engine("qwen3_5", arch=arch)) for arch in ("sm_90", "sm_80"))
    assert one.arch == "sm_90" and other.arch == "sm_80"
    own = {"arch": "", "identity": "", "sha256": {}, "kernels": ()}
    assert one.model_copy(update=own) == other.model_copy(update=own)
