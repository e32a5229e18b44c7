"""Kernels over quantised weights: what any step launches is among what an engine brings; no GPU needed."""

import random
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from hemiola.plugins import OPS
from hemiola.plugins.gpu.compile import compile_call
from hemiola.plugins.gpu.cover import calls_at, calls_of
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.gpu.launch import Call
from hemiola.plugins.gpu.lines import pack_lines, random_lines, sections
from hemiola.plugins.gpu.sizes import Size
from hemiola.plugins.gpu.words import pack_words
from hemiola.plugins.groups import Layout, WeightGroup
from hemiola.runtime.manifest_parts import Drawn

OUTPUTS, INPUTS, EXPERTS, SLOTS = 96, 320, 8, 2
MOST = Size(2000, 64, 9)
LAYOUTS = [
    Layout("e4m3", 128),
    Layout("int4", 32, ("zeros",)),
    Layout("e2m1", 16, ("factor",)),
    Layout("int8", 0),
]
NARROW = [Layout("e4m3", 128, (), "group"), Layout("e4m3", 0, (), "token"), Layout("e4m3", 0, (), "static")]
FORMS = {"coded": LAYOUTS, "e4m3": NARROW}


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def arguments(op: str, layout: Layout, dtype: torch.dtype, size: Size) -> list[Any]:
    """Of a node's form in a step of this size."""
    x, pack = made(size.tokens, INPUTS, dtype=dtype), pack_lines if layout.inputs else pack_words
    weight, none = pack(WeightGroup.empty(layout, (OUTPUTS, INPUTS))), made(0, dtype=dtype)
    match op:
        case "linear":
            return [x, weight, none, OUTPUTS, made(len(x), OUTPUTS, dtype=dtype)]
        case "linear_argmax" | "linear_swiglu":
            return [x, weight, made(OUTPUTS, dtype=dtype), OUTPUTS]
    up = pack(WeightGroup.empty(layout, (EXPERTS, 2 * OUTPUTS, INPUTS)))
    down = pack(WeightGroup.empty(layout, (EXPERTS, INPUTS, OUTPUTS)))
    ids, shares = made(len(x), SLOTS, dtype=torch.int32), made(len(x), SLOTS, dtype=torch.float32)
    return [x, ids, shares, up, down, "swiglu", OUTPUTS]


def layouts_of(op: str, layout: Layout) -> dict[str, Layout]:
    return dict.fromkeys(("up", "down") if op == "moe" else ("weight",), layout)


def compiled(op: str, layout: Layout, dtype: torch.dtype, capability: int) -> set[Call]:
    given = partial(arguments, op, layout, dtype)
    form = "e4m3" if layout.inputs else "coded"
    return calls_of(OPS[op], given, MOST, Gpu(capability, 132), form, layouts_of(op, layout))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form, capability", [("coded", 80), ("coded", 90), ("e4m3", 89), ("e4m3", 90)])
@pytest.mark.parametrize("op", ["linear", "linear_swiglu", "linear_argmax", "moe"])
def test_whatever_a_step_is_like_its_kernels_are_compiled(
    op: str, form: str, capability: int, dtype: torch.dtype
) -> None:
    rng, num = random.Random(op), len(OPS[op].args) + len(OPS[op].attrs)
    for layout in FORMS[form]:
        found = compiled(op, layout, dtype, capability)
        for _ in range(20):
            size = Size(min(int(2 ** rng.uniform(0, 11)), MOST.tokens), 1, 1)
            gpu, given = Gpu(capability, rng.randrange(20, 200)), arguments(op, layout, dtype, size)
            sizes = [value for value in given[num:] if isinstance(value, int)]
            bound = OPS[op].bind(form, sizes, layouts_of(op, layout))
            assert calls_at(bound, gpu, *given[:num], *given[num + len(sizes) :]) <= found, size


@pytest.mark.parametrize("layout", NARROW, ids=str)
def test_random_lines_have_numbers_of_the_size_that_was_asked_for(layout: Layout) -> None:
    shape = (3, 50, 80)
    found = random_lines(layout, shape, 0.25, torch.Generator().manual_seed(1))
    assert found.shape == pack_lines(WeightGroup.empty(layout, shape)).shape
    lines = sections(found, layout, *shape[1:])
    numbers = lines.codes[:, : 50 * lines.width].float() * lines.scales[0, 0]
    assert abs(numbers.std() / 0.25 - 1) < 0.05 and bool((lines.scales[:, :50] > 0).all())
    drawn = Drawn(shape=shape, dtype="bfloat16", std=0.25, layout=str(layout))
    assert drawn.nbytes == found.numel() and 0 < lines.static[0, 0] < 1


@pytest.mark.parametrize("layout", LAYOUTS[:3:2], ids=str)
def test_kernels_for_few_tokens_fit_where_there_is_little_shared_memory(layout: Layout) -> None:
    """Whole engines compile all others (tests/gpu/test_quantised.py)."""
    calls = compiled("linear", layout, torch.bfloat16, 86)
    (call,) = (
        call for call in calls if ("TOKENS", 16) in call.constants and ("ABREAST", True) in call.constants
    )
    assert "mma.sync" in compile_call(call, 86).ptx


@pytest.mark.parametrize("capability, product", [(89, "mma.sync"), (90, "wgmma"), (120, "mma.sync")])
def test_products_of_e4m3_are_the_tensor_cores_own(capability: int, product: str) -> None:
    """Not widened to fp16 first, which tiles of fewer than 64 outputs are."""
    calls = compiled("linear", NARROW[0], torch.bfloat16, capability)
    (many,) = (call for call in calls if ("TOKENS", 128) in call.constants)
    ptx = compile_call(many, capability).ptx
    lines = [line for line in ptx.splitlines() if product in line and "fence" not in line]
    found = [line for line in lines if ".e4m3.e4m3" in line]
    assert found and not any(".f16.f16" in line for line in lines)
