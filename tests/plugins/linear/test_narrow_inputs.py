"""Inputs in e4m3 on a CPU: torch's casts, an fp64 product of them, and the reference's bits at any place."""

import itertools

import pytest
import torch
from kit import redzones

from hemiola.plugins.cpu.tiles import STRIP
from hemiola.plugins.groups import E4M3, Layout, WeightGroup, dequantised
from hemiola.plugins.inputs import LARGEST, LEAST, SPAN
from hemiola.plugins.linear.compiled import pack
from hemiola.plugins.linear.compiled_e4m3 import linear
from hemiola.plugins.linear.reference import linear_e4m3
from hemiola.plugins.linear.spec import LINEAR
from hemiola.plugins.spec import Unsupported
from tests.plugins.linear import test_codes
from tests.plugins.linear.chains import NUM_TOKENS

NONE = torch.empty(0)
STATIC = 0.013
LAYOUTS = [
    Layout("e4m3", span, (), by)
    for by, span in itertools.product(("group", "token", "static"), (0, SPAN, 2 * SPAN))
]
EACH = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
SIZES = [(1, 16), (STRIP, 48), (STRIP + 1, 33), (100, SPAN + 80), (4 * STRIP + 5, 4 * SPAN + 16), (300, SPAN)]


def make(layout: Layout, *shape: int, static: torch.Tensor | float = STATIC, seed: int = 0) -> WeightGroup:
    """static: of each expert, or of all."""
    group = test_codes.make(layout, *shape, seed=seed)
    if layout.inputs == "static":
        rows = torch.as_tensor(static).view(-1, *[1] * (len(shape) - 1)).expand(*shape[:-1], 1)
        group.tensors["input"] = rows.contiguous()
    return group


def lines(num_inputs: int, seed: int = 1) -> torch.Tensor:
    """Of sizes far apart; zeros, numbers that no e4m3 number is near to, NaN and infinities among them."""
    print("seed", seed)
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(max(NUM_TOKENS), num_inputs, generator=rng)
    x *= torch.logspace(-12, 5, len(x))[:, None]
    x[3], x[4, 0], x[5, num_inputs // 2], x[6, -1] = 0, -torch.inf, torch.nan, torch.inf
    return x


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bits, but those of NaN."""
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


@EACH
@pytest.mark.parametrize("num_outputs, num_inputs", SIZES)
@pytest.mark.usefixtures("poisoned_empty")
def test_every_bit_is_that_of_the_reference(num_outputs: int, num_inputs: int, layout: Layout) -> None:
    """Whatever runs beside a row: a prefix of rows, and one in another place."""
    group, x = make(layout, num_outputs, num_inputs), lines(num_inputs)
    rng = torch.Generator().manual_seed(2)
    bias, residual = torch.randn(num_outputs, generator=rng), torch.randn(len(x), num_outputs, generator=rng)
    expected, packed = linear_e4m3(x, group, bias, residual), pack(group)
    with redzones.red_zones():
        for num in NUM_TOKENS:
            given = [x[:num].clone(), packed, bias, residual[:num].clone()]
            with redzones.given(given, [False] * 4) as (some, weight, added, rest):
                y = linear(some, weight, added, num_outputs, layout, rest)
            assert same(y, expected[:num]), f"{num} tokens"
    alone = linear_e4m3(x[7:8], group, NONE)
    assert same(linear(x[5:9], packed, NONE, num_outputs, layout)[2:3], alone)


@EACH
def test_it_is_an_fp64_product_of_torchs_casts(layout: Layout) -> None:
    """But for 128 roundings of each sum: errors are relative to the sum of sizes."""
    group = make(layout, 100, 4 * SPAN + 16)
    x, weight = torch.randn(9, 4 * SPAN + 16, generator=torch.Generator().manual_seed(3)), dequantised(group)
    x *= torch.logspace(-3, 3, 9)[:, None]
    spans = {"group": SPAN}.get(layout.inputs, x.shape[1])
    rounded = []
    for part in x.split(spans, dim=1):
        scale = part.abs().amax(1, keepdim=True).clamp(min=LEAST) * torch.tensor(1 / LARGEST)
        scale = torch.tensor(STATIC) if layout.inputs == "static" else scale
        rounded.append((part / scale).clamp(-LARGEST, LARGEST).to(E4M3).double() * scale)
    codes = torch.cat(rounded, 1)
    error = (linear(x, pack(group), NONE, 100, layout).double() - codes @ weight.double().T).abs()
    assert float((error / (codes.abs() @ weight.double().abs().T)).max()) < 2e-6
    if layout.inputs == "static":
        largest = torch.tensor(STATIC).double() * LARGEST
        assert codes.abs().amax(1).tolist()[5:] == [largest] * 4, "what is beyond is the largest number"
    kept = ((codes - x).abs() <= x.abs() / 16).double().mean()
    assert kept > 0.5, "most are as near as e4m3 can be"


@EACH
def test_zeros_and_what_is_no_number(layout: Layout) -> None:
    group, x = make(layout, 40, SPAN + 80), lines(SPAN + 80)
    y = linear(x, pack(group), NONE, 40, layout)
    by_token = [4, 6] if layout.inputs != "static" else []  # which makes infinities the largest number
    assert y.isnan().any(1).nonzero().flatten().tolist() == sorted([5, *by_token])
    assert bool(y[[*by_token, 5]].isnan().all()) and not y[3].any()


@EACH
def test_its_shape_is_known_without_memory(layout: Layout) -> None:
    empty, full = (pack(made) for made in (WeightGroup.empty(layout, (3, 50, 80)), make(layout, 3, 50, 80)))
    assert (empty.shape, empty.dtype) == (full.shape, full.dtype) and empty.is_meta
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    "layout, said",
    [
        (Layout("e4m3", 64, (), "group"), "a scale for 64 inputs, no multiple of 128"),
        (Layout("int8", 128, (), "token"), "multiplied with weights in e4m3 alone"),
        (Layout("e2m1", 16, ("factor",), "static"), "multiplied with weights in e4m3 alone"),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_no_form_multiplies_is_refused(device: str, layout: Layout, said: str) -> None:
    x, weight, bias = (torch.empty(shape) for shape in ((2, 96), (32, 96), (0,)))
    call = LINEAR.call(x, weight, bias)._replace(layouts={"weight": layout})
    with pytest.raises(Unsupported, match=said):
        LINEAR.choose(call, device)


def test_wide_and_narrow_inputs_have_forms_of_their_own() -> None:
    x, weight, bias = (torch.empty(shape) for shape in ((2, 96), (32, 96), (0,)))
    for layout, form in ((Layout("e4m3", 0), "compiled"), (LAYOUTS[0], "compiled_e4m3")):
        call = LINEAR.call(x, weight, bias)._replace(layouts={"weight": layout})
        assert LINEAR.choose(call, "cpu").form.name == form


@pytest.mark.parametrize("text", ["e4m3 128 x e4m3 by", "e4m3 128 x e4m3 by tensor", "e4m3 128 x e4m3 by "])
def test_a_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no layout of a quantised weight"):
        Layout.parse(text)
