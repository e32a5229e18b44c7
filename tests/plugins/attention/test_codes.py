"""Pages of codes: their formulas again in numpy (fp64), the layout of a page, SDPA on what is read."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kit.ops import form, int32, rel_error, row

from hemiola.plugins import OPS
from hemiola.plugins.attention import reference
from hemiola.plugins.attention.pages import CENTRES, CODES, FORMATS, bits_of, borders, centres, refuses_codes
from hemiola.plugins.spec import E4M3, Unsupported

CODED = [kv for kv in FORMATS if kv.startswith("turboquant")]
KINDS = [("key", 3), ("key", 4), ("value", 3), ("value", 4)]
BYTES = {  # of a head and token, for heads of 128 and 256: vLLM's
    "auto": (512, 1024),
    "fp8": (256, 512),
    "turboquant_k8v4": (196, 388),
    "turboquant_4bit_nc": (134, 262),
    "turboquant_k3v4_nc": (118, 230),
    "turboquant_3bit_nc": (102, 198),
}
TABLES = {  # as published, four digits
    3: (0.2450, 0.7556, 1.3432, 2.1503),
    4: (0.1284, 0.3881, 0.6569, 0.9424, 1.2563, 1.6179, 2.0684, 2.7309),
}


def hadamard(depth: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < depth:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def turned(k: np.ndarray) -> np.ndarray:
    """In units of 1 / sqrt(D)."""
    k = k.astype(np.float64)
    return (k / (np.linalg.norm(k, axis=-1, keepdims=True) + 1e-8)) @ hadamard(k.shape[-1])


def bits_in(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes by way of a string of bits."""
    ones = np.unpackbits(packed, axis=-1, bitorder="little")
    return (ones.reshape(*ones.shape[:-1], -1, bits) << np.arange(bits)).sum(-1)


def numbers(depth: int, seed: int = 0) -> torch.Tensor:
    """Tokens of every size, one of zeros and one of equal numbers, [40, 3, depth]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 3, depth, generator=generator) * torch.logspace(-3, 3, 40)[:, None, None]
    x[5], x[6] = 0, 3
    return x


def stored(
    part: str, bits: int, x: torch.Tensor, page_len: int = 48
) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """A page with these tokens, and its codes [L, G, D] and notes."""
    page_len, depth = 48, x.shape[2]
    width = depth * bits // 8 + (2 if part == "key" else 4)
    page = torch.full((page_len, x.shape[1], width), 0xFF, dtype=CODES)
    for place, one in enumerate(x):
        reference.store(part, page, place, one, 1.0)
    flat, num = page.numpy().reshape(-1), page_len * x.shape[1] * depth * bits // 8
    codes = bits_in(flat[:num].reshape(page_len, x.shape[1], -1), bits)[: len(x)]
    notes = flat[num:].view(np.float16).reshape(page_len, x.shape[1], -1)[: len(x)]
    return page, codes, notes.astype(np.float64)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("depth", [16, 64, 128, 256])
def test_a_keys_codes_are_the_formulas(depth: int, bits: int) -> None:
    """But for numbers within fp32's rounding of a border."""
    k = numbers(depth)
    _, codes, norms = stored("key", bits, k)
    table = np.array(centres(bits), np.float64)
    middles = (table[1:] + table[:-1]) / 2
    y = turned(k.numpy())
    expected = (middles <= y[..., None]).sum(-1)
    near = np.abs(y[..., None] - middles).min(-1) < 1e-5
    assert (codes == expected)[~near].all() and near[7:].mean() < 1e-2
    assert near[5].all() and (codes[5] == 2 ** (bits - 1)).all(), "of zeros the middle, upwards"
    length = np.linalg.norm(k.numpy().astype(np.float64), axis=-1)
    found = norms[..., 0] * np.linalg.norm(table[codes], axis=-1)
    assert np.allclose(found, length, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("depth", [16, 80, 256])
def test_a_values_codes_are_the_formulas(depth: int, bits: int) -> None:
    v = numbers(depth)
    _, codes, notes = stored("value", bits, v)
    wide = v.numpy().astype(np.float64)
    least, most = wide.min(-1, keepdims=True), wide.max(-1, keepdims=True)
    step = np.maximum((most - least) / (2**bits - 1), 1e-8)
    steps = (wide - least) / step + 0.5
    expected = np.clip(np.trunc(steps), 0, 2**bits - 1)
    near = np.abs(steps - np.round(steps)) < 1e-4
    assert (codes == expected)[~near].all() and near.mean() < 2e-2
    assert np.array_equal(notes[..., :1], step.astype(np.float16)) or np.allclose(
        notes[..., :1], step, rtol=1e-3
    )
    assert np.allclose(notes[..., 1:], least, rtol=1e-3)


@pytest.mark.parametrize(("part", "bits"), KINDS)
@pytest.mark.parametrize("depth", [64, 256])
def test_what_is_read_is_what_the_formulas_make_of_the_bytes(part: str, bits: int, depth: int) -> None:
    """And near what was stored: within the error that a normal number has at so many bits."""
    x = numbers(depth, seed=1)
    page, codes, notes = stored(part, bits, x)
    found = reference.load(part, page, depth, 1.0, torch.float64)[: len(x)].numpy()
    if part == "key":
        centre = np.array(centres(bits))[codes]
        unit = centre / np.sqrt((centre**2).sum(-1, keepdims=True))
        length = notes * np.linalg.norm(centre, axis=-1, keepdims=True)
        expected = length * (unit @ hadamard(depth)) / np.sqrt(depth)
    else:
        expected = codes * notes[..., :1] + notes[..., 1:]
    assert np.allclose(found, expected, rtol=1e-9, atol=1e-12)
    error = rel_error(torch.from_numpy(found[7:]), x[7:])
    limits = {("key", 3): 0.19, ("key", 4): 0.1, ("value", 3): 0.24, ("value", 4): 0.12}
    assert error < limits[part, bits]


@pytest.mark.parametrize("kv", FORMATS)
def test_bytes_of_a_token_are_those_of_the_table(kv: str) -> None:
    for depth, wanted in zip((128, 256), BYTES[kv], strict=True):
        pairs = zip(FORMATS[kv].widths(depth), FORMATS[kv].dtypes(torch.bfloat16), strict=True)
        assert sum(width * dtype.itemsize for width, dtype in pairs) == wanted


@pytest.mark.parametrize("bits", CENTRES)
def test_tables_are_the_published_ones(bits: int) -> None:
    assert np.allclose(CENTRES[bits], TABLES[bits], atol=5e-5 + 1e-9)
    table, between = centres(bits), borders(bits)
    assert len(table) == 2**bits and len(between) == 2**bits - 1
    assert all(low < border < high for low, border, high in zip(table, between, table[1:], strict=False))
    assert all(float(np.float32(number)) == number for number in (*table, *between))


def test_widths_that_no_codes_have_are_refused() -> None:
    """A stranger's engine could name pages that are smaller than what kernels write."""
    assert bits_of("key", CODES, 66, 128) == 4 and bits_of("value", CODES, 68, 128) == 4
    assert bits_of("key", E4M3, 128, 128) == 8 and bits_of("value", torch.float32, 128, 128) == 0
    for part, dtype, width in (
        ("key", CODES, 68),
        ("key", CODES, 128),
        ("value", E4M3, 64),
        ("key", torch.float32, 66),
    ):
        with pytest.raises(ValueError, match=f"{part}s of 128 numbers do not take {width}"):
            bits_of(part, dtype, width, 128)
    assert "rotated by a power of two" in refuses_codes("key", 4, 80)
    assert not refuses_codes("value", 4, 80) and not refuses_codes("key", 8, 80)


def step_of(
    kv: str, depth: int, kv_len: int, num: int, heads: int, groups: int, page_len: int
) -> tuple[list, list]:
    """A call for one row, over pages full of 0xFF, and the tokens of all its text."""
    generator = torch.Generator().manual_seed(depth + kv_len)
    tokens = [torch.randn(kv_len, n, depth, generator=generator) for n in (heads, groups, groups)]
    width = -(-kv_len // page_len)
    pools, shown = [], FORMATS[kv]
    for each, dtype in zip(shown.widths(depth), shown.dtypes(torch.float32), strict=True):
        raw = torch.full((width + 2, page_len, groups, each * dtype.itemsize), 0xFF, dtype=torch.uint8)
        pools.append(raw.view(dtype))
    table = int32(*range(width, 0, -1)).view(1, -1)
    for part, pages, x in zip(("key", "value"), pools, tokens[1:], strict=True):
        for place in range(kv_len - num):
            reference.store(part, pages[table[0, place // page_len]], place % page_len, x[place], 1.0)
    line = int32(row(num_tokens=num, committed=kv_len - num))
    at = torch.arange(kv_len - num, kv_len, dtype=torch.int32)
    new = [x[kv_len - num :] for x in tokens]
    return [*new, *pools, table, line, at, depth**-0.5, 0, 1.0, 1.0], tokens


def kept(kv: str, tokens: list[torch.Tensor], page_len: int = 16) -> Iterator[torch.Tensor]:
    """All keys, then all values, as they are read."""
    form_ = FORMATS[kv]
    depth = tokens[0].shape[2]
    kinds = zip(("key", "value"), tokens[1:], form_.widths(depth), form_.dtypes(torch.float32), strict=True)
    for part, x, width, dtype in kinds:
        page = torch.zeros(-(-len(x) // page_len) * page_len, x.shape[1], width, dtype=dtype)
        for place, one in enumerate(x):
            reference.store(part, page, place, one, 1.0)
        yield reference.load(part, page, depth, 1.0, torch.float32)[: len(x)]


@pytest.mark.parametrize("kv", CODED)
@pytest.mark.parametrize(
    ("depth", "heads", "groups", "num", "page_len"),
    [
        (64, 8, 2, 1, 16),
        (64, 4, 4, 90, 48),
        (128, 6, 2, 5, 32),
        (256, 8, 1, 1, 64),
        (256, 2, 2, 70, 16),
        (16, 32, 1, 3, 16),
    ],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_attention_is_sdpa_over_what_is_read(
    kv: str, depth: int, heads: int, groups: int, num: int, page_len: int
) -> None:
    """torch's own, in fp32: sums in other orders."""
    step, tokens = step_of(kv, depth, 90, num, heads, groups, page_len)
    o = form(OPS["attention"], "compiled")(*step)
    q, (k, v) = tokens[0], kept(kv, tokens)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(o, expected[90 - num :], rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("kv", CODED)
def test_pages_are_the_references_bytes_however_a_text_is_cut(kv: str) -> None:
    """And what no token has stays as it was."""
    for num in (90, 1, 33):
        step, tokens = step_of(kv, 64, 90, num, 4, 2, 32)
        form(OPS["attention"], "compiled")(*step)
        whole, _ = step_of(kv, 64, 90, 0, 4, 2, 32)
        for part, pages, x in zip(("key", "value"), whole[3:5], tokens[1:], strict=True):
            for place in range(90):
                reference.store(part, pages[step[5][0, place // 32]], place % 32, x[place], 1.0)
        for mine, wanted in zip(step[3:5], whole[3:5], strict=True):
            assert torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("argument", [1, 2])
@pytest.mark.parametrize("name", ["reference", "compiled"])
def test_what_is_no_number_spoils_its_own_row_alone(name: str, argument: int, number: float) -> None:
    step, _ = step_of("turboquant_4bit_nc", 64, 20, 1, 4, 2, 16)
    step[argument][0, 0, 5] = number
    o = form(OPS["attention"], name)(*step)
    assert not o[0, :2].isfinite().all() and o[0, 2:].isfinite().all()


def test_heads_that_cannot_be_rotated_have_other_formats() -> None:
    op = OPS["attention"]
    step, _ = step_of("turboquant_k8v4", 80, 20, 3, 4, 2, 16)
    assert op.choose(op.call(*step), "cpu").form.name == "compiled"
    pools = [torch.zeros(4, 16, 2, width, dtype=CODES) for width in (42, 44)]
    with pytest.raises(Unsupported, match="heads have 80 numbers; keys of 4 bits are rotated") as refused:
        op.choose(op.call(*step[:3], *pools, *step[5:]), "cpu")
    assert refused.value.option == "kv_dtype"
