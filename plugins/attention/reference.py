"""Causal attention over paged keys and values, one token and one head at a time."""

import torch

from hemiola.plugins.attention.pages import (
    CODES,
    NOTES,
    TINY,
    bits_of,
    borders,
    centres,
    code_bytes,
)
from hemiola.plugins.rows import RowFields
from hemiola.plugins.spec import E4M3

LARGEST = 448.0  # e4m3 number


def attention(
    q: torch.Tensor,  # [T, H, D]
    k: torch.Tensor,  # [T, G, D]
    v: torch.Tensor,  # [T, G, D]
    k_pages: torch.Tensor,  # [pages, page_len, G, A], written; A is D, or bytes of codes (pages.py)
    v_pages: torch.Tensor,  # [pages, page_len, G, B], written
    page_table: torch.Tensor,  # [N, W] int32: row n's tokens p stand in page page_table[n, p // page_len]
    rows: torch.Tensor,  # [N, 8], see plugins/rows.py; of which it reads first, num_tokens and slot
    positions: torch.Tensor,  # [T] int32: a token's place in its sequence
    scale: float,
    first: int,
    k_scale: float,
    v_scale: float,
    logits_ids: torch.Tensor | None = None,  # [I] int32: tokens that attend; none given: all
) -> torch.Tensor:  # [T, H, D]
    """Writes every token's k and v to its page, then o = softmax(scale q.k) v over its row's tokens up to it,
    from the place `first` on (an MTP head has no entry at place 0).

    In fp32 (float64 for float64) on what the pages hold after their rounding: k / k_scale and v / v_scale, or
    codes. Query head h reads key head h // (H / G) (Ainslie et al. 2023, arXiv 2305.13245). Padding comes out
    as zeros. With `logits_ids`, outputs of other tokens may be anything.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    page_len, depth = k_pages.shape[1], q.shape[2]
    heads_per_group = q.shape[1] // k.shape[1]
    fields = [RowFields(*line, end=0, new_edge=0) for line in rows.tolist()]
    owners = {
        t: n for n, row in enumerate(fields) if row.slot for t in range(row.first, row.first + row.num_tokens)
    }

    for t, row in owners.items():
        page, place = int(page_table[row, positions[t] // page_len]), int(positions[t]) % page_len
        store("key", k_pages[page], place, k[t], k_scale)
        store("value", v_pages[page], place, v[t], v_scale)

    o = torch.zeros(q.shape, dtype=wide)
    for t, row in owners.items():
        num_keys = int(positions[t]) + 1
        pages = page_table[row, : -(-num_keys // page_len)].tolist()
        keys = torch.cat([load("key", k_pages[page], depth, k_scale, wide) for page in pages])
        values = torch.cat([load("value", v_pages[page], depth, v_scale, wide) for page in pages])
        keys, values = keys[first:num_keys], values[first:num_keys]  # [keys, G, D]
        for h in range(q.shape[1]):
            g = h // heads_per_group
            probability = torch.softmax(keys[:, g] @ q[t, h].to(wide) * scale, 0)
            o[t, h] = probability @ values[:, g]
    return o.to(q.dtype)


def store(part: str, page: torch.Tensor, place: int, x: torch.Tensor, scale: float) -> None:
    """Write the key or the value x [G, D] of the page's token `place`."""
    bits = bits_of(part, page.dtype, page.shape[2], x.shape[1])
    if page.dtype is not CODES:
        page[place] = _kept(x, scale, page.dtype)
        return
    numbers = x.to(torch.float32)
    new_codes, notes = _key_codes(numbers, bits) if part == "key" else _value_codes(numbers, bits)
    codes, sizes = parts_of(part, page, bits, x.shape[1])
    codes[place], sizes[place] = packed(new_codes, bits), notes


def load(part: str, page: torch.Tensor, depth: int, scale: float, wide: torch.dtype) -> torch.Tensor:
    """All keys or values of a page, [page_len, G, D]."""
    bits = bits_of(part, page.dtype, page.shape[2], depth)
    if page.dtype is not CODES:
        return page.to(wide) * scale
    codes, sizes = parts_of(part, page, bits, depth)
    indices, sizes = unpacked(codes, bits), sizes.to(wide)
    if part == "value":
        return indices * sizes[..., :1] + sizes[..., 1:]
    table = torch.tensor(centres(bits), dtype=wide)
    return rotated(table[indices] * sizes) / torch.tensor(depth, dtype=wide).sqrt()  # its own inverse


def parts_of(part: str, page: torch.Tensor, bits: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a page's codes [L, G, bytes] and of the fp16 numbers behind them [L, G, 1 or 2]."""
    page_len, groups, _ = page.shape
    num = page_len * groups * code_bytes(bits, depth)
    flat = page.view(-1)
    codes, sizes = flat[:num], flat[num:].view(torch.float16)
    return codes.view(page_len, groups, -1), sizes.view(page_len, groups, NOTES[part])


def _kept(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """As a page has it. What is beyond e4m3 becomes its largest number; torch's cast may make NaN of it."""
    units = x.to(torch.promote_types(x.dtype, torch.float32)) / scale
    return (units.clamp(-LARGEST, LARGEST) if dtype is E4M3 else units).to(dtype)


def _key_codes(k: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Directions as codes of the rotated key; and its norm over that of what the codes stand for."""
    norm = _root(_tree(k * k))
    turned = rotated(k / (norm + TINY))
    codes = sum((turned >= border).int() for border in borders(bits))
    assert isinstance(codes, torch.Tensor)
    centre = torch.tensor(centres(bits))[codes.long()]
    return codes, (norm / _root(_tree(centre * centre))).to(torch.float16)


def _value_codes(v: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps above the least number; and the step and that number."""
    max_code = 2**bits - 1
    sound = (v - v).sum(-1, keepdim=True)  # NaN where a number is none, or has no end; else 0
    low, high = v.amin(-1, keepdim=True) + sound, v.amax(-1, keepdim=True)
    step = ((high - low) / max_code).clamp(min=TINY) + sound
    codes = ((v - low) / step + 0.5).nan_to_num(0.0).clamp(0, max_code).int()
    return codes, torch.cat((step, low), -1).to(torch.float16)


def _tree(x: torch.Tensor) -> torch.Tensor:
    """Sums of the last dimension, halves upon each other: one order on every device."""
    while x.shape[-1] > 1:
        low, high = x.chunk(2, -1)
        x = low + high
    return x


def _root(x: torch.Tensor) -> torch.Tensor:
    """Square roots, rounded once: torch's own of fp32 may not be."""
    return x.double().sqrt().float()


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x times the Hadamard matrix (Sylvester's, of -1 and 1), by the fast transform: one order of sums."""
    step = 1
    while step < x.shape[-1]:
        low, high = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        step *= 2
    return x


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Eight codes in `bits` bytes, the first in the lowest bits; little endian."""
    words = (codes.unflatten(-1, (-1, 8)).long() << torch.arange(8) * bits).sum(-1, keepdim=True)
    return (words >> torch.arange(bits) * 8 & 255).to(torch.uint8).flatten(-2)


def unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    words = (codes.unflatten(-1, (-1, bits)).long() << torch.arange(bits) * 8).sum(-1, keepdim=True)
    return (words >> torch.arange(8) * bits & (1 << bits) - 1).flatten(-2)
