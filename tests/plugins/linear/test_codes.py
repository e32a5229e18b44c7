"""Quantised weights on a CPU: the bits of the fp32 weight that they stand for, at any number of tokens."""

from typing import Any

import pytest
import torch
from kit import redzones
from kit.ops import same_bits

from hemiola.plugins.cpu.tiles import DEPTH, STRIP
from hemiola.plugins.groups import CODES, E4M3, Layout, WeightGroup, dequantised
from hemiola.plugins.linear.codes import pack_group
from hemiola.plugins.linear.compiled import linear, pack
from hemiola.plugins.linear.spec import LINEAR
from hemiola.plugins.moe.compiled import moe
from hemiola.plugins.spec import Unsupported
from tests.plugins.linear.chains import NUM_TOKENS

NONE = torch.empty(0)
LAYOUTS = [
    Layout("e4m3", 128), Layout("e4m3", 0), Layout("e4m3", 48), Layout("e2m1", 16, ("factor",)),
    Layout("e2m1", 16, ("divisor",)), Layout("int8", 0), Layout("int8", 32, ("zeros",)), Layout("int4", 32),
    Layout("int4", 128), Layout("int4", 64, ("zeros",)), Layout("int4", 0), Layout("int4", 512),
]  # fmt: skip
SIZES = [(1, 16), (STRIP, 48), (STRIP + 1, 33), (100, DEPTH + 80), (4 * STRIP + 5, 2 * DEPTH + 16), (300, 40)]
EACH = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def make(layout: Layout, *shape: int, seed: int = 0) -> WeightGroup:
    """Every code, scales far apart, subnormal ones and a few of the largest."""
    rng = torch.Generator().manual_seed(seed)
    empty = WeightGroup.empty(layout, shape)

    def random(name: str, size: torch.Size) -> torch.Tensor:
        if name in ("codes", "zeros"):
            least, most = {"int4": (-8, 8), "int8": (-128, 128), "e2m1": (0, 16), "e4m3": (0, 256)}[
                layout.kind
            ]
            found = torch.randint(least, most, size, generator=rng)
            if layout.kind != "e4m3":
                return found.to(CODES[layout.kind] if name == "codes" else torch.int16)
            return torch.where(found % 128 == 127, 5, found).to(torch.uint8).view(E4M3)
        scales = torch.rand(size, generator=rng) * 2.0 ** torch.randint(-8, 3, size, generator=rng)
        is_narrow = name == "scales" and layout.kind == "e2m1"
        return scales.to(E4M3).float().clamp(min=2.0**-9).to(E4M3) if is_narrow else scales + 2.0**-20

    return WeightGroup(layout, {name: random(name, each.shape) for name, each in empty.tensors.items()})


@EACH
@pytest.mark.parametrize("num_outputs, num_inputs", SIZES)
@pytest.mark.usefixtures("poisoned_empty")
def test_every_bit_is_that_of_the_fp32_weight(num_outputs: int, num_inputs: int, layout: Layout) -> None:
    group = make(layout, num_outputs, num_inputs)
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(max(NUM_TOKENS), num_inputs, generator=rng)
    bias, residual = torch.randn(num_outputs, generator=rng), torch.randn(len(x), num_outputs, generator=rng)
    wide, packed = pack(dequantised(group)), pack(group)
    expected = linear(x, wide, bias, num_outputs, residual)
    with redzones.red_zones():
        for num in NUM_TOKENS:
            given = [x[:num].clone(), packed, bias, residual[:num].clone()]
            with redzones.given(given, [False] * 4) as (some, weight, added, rest):
                y = linear(some, weight, added, num_outputs, rest, weight_layout=layout)
            assert same_bits(y, expected[:num]), f"{num} tokens"


@EACH
def test_experts_are_those_of_the_fp32_weights(layout: Layout) -> None:
    up, down = make(layout, 5, 96, 80, seed=3), make(layout, 5, 80, 48, seed=4)
    rng = torch.Generator().manual_seed(2)
    x, shares = torch.randn(40, 80, generator=rng), torch.rand(40, 3, generator=rng)
    ids = torch.rand(40, 5, generator=rng).argsort(1)[:, :3].int()
    expected = moe(x, ids, shares, pack(dequantised(up)), pack(dequantised(down)), "swiglu", 48)
    for num in (1, 7, 40):
        few = (x[:num], ids[:num], shares[:num], pack(up), pack(down), "swiglu", 48)
        y = moe(*few, up_layout=layout, down_layout=layout)
        assert same_bits(y, expected[:num])
    beside = moe(x, ids, shares, pack(up), pack(dequantised(down)), "swiglu", 48, up_layout=layout)
    assert same_bits(beside, expected), "layers may differ in what is quantised"


@EACH
def test_it_takes_as_many_bytes_as_its_codes_and_scales(layout: Layout) -> None:
    num_outputs, num_inputs = 2 * STRIP, 2 * DEPTH
    bits = {"e4m3": 8, "int8": 8, "int4": 4, "e2m1": 4}[layout.kind]
    span = layout.span if layout.span in (16, 32, 64, 128) else {48: 16}.get(layout.span, DEPTH)
    each = 32 * (1 + ("zeros" in layout.others)) / span
    assert pack(make(layout, num_outputs, num_inputs)).numel() == num_outputs * num_inputs * (bits + each) / 8
    experts = make(layout, 3, 40, 80)
    parts = [pack(experts.map(lambda tensor, n=n: tensor[n])) for n in range(3)]
    assert torch.equal(pack(experts), torch.stack(parts))


@EACH
def test_its_shape_is_known_without_memory(layout: Layout) -> None:
    empty, full = (pack_group(make_(layout, 3, 50, 80)) for make_ in (_empty, make))
    assert (empty.shape, empty.dtype) == (full.shape, full.dtype) and empty.is_meta


def _empty(layout: Layout, *shape: int) -> WeightGroup:
    return WeightGroup.empty(layout, shape)


def test_a_weight_of_another_layout_is_refused() -> None:
    packed = pack(make(LAYOUTS[0], 64, 256))
    for layout in (None, Layout("int4", 128), Layout("e4m3", 64), Layout("int8", 128, ("zeros",))):
        with pytest.raises(ValueError, match="is not packed from"):
            linear(torch.zeros(2, 256), packed, NONE, 64, weight_layout=layout)


@pytest.mark.parametrize(
    "device, layout, said",
    [
        ("cpu", Layout("int4", 24), "a scale for 24 inputs"),
        ("cuda", Layout("int4", 24), "a scale for 24 inputs"),
        ("cuda", Layout("e2m1", 32), "e2m1 codes have scales for 16 inputs"),
        ("cuda", Layout("e4m3", 32, ("zeros",)), "e4m3 codes have no zero points"),
    ],
)
def test_a_form_that_cannot_take_it_says_why(device: str, layout: Layout, said: str) -> None:
    x, weight, bias = (torch.empty(shape) for shape in ((2, 96), (32, 96), (0,)))
    call: Any = LINEAR.call(x, weight, bias)._replace(layouts={"weight": layout})
    with pytest.raises(Unsupported, match=f"weight is {layout}: {said}"):
        LINEAR.choose(call, device)


@pytest.mark.parametrize("text", ["", "e4m3", "e5m2 128", "e4m3 0", "int4 -3", "int4 32 more", "int4 3x"])
def test_a_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no layout of a quantised weight"):
        Layout.parse(text)


@EACH
def test_a_layout_is_its_text(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
