"""Narrow pages on CUDA: how a token's key and value become codes of 3 and 4 bits, and how kernels read these,
and e4m3.

Bytes are those of reference.py: sums have its order, quotients and roots are rounded once, nothing is
contracted.
"""

import os
import struct
from collections.abc import Iterable

import triton
import triton.language as tl

from hemiola.plugins.attention.pages import CENTRES, TINY, borders, centres
from hemiola.plugins.gpu.rows import owner_of

_BORDERS_3, _BORDERS_4 = tl.constexpr(borders(3)), tl.constexpr(borders(4))
_CENTRES_3, _CENTRES_4 = tl.constexpr(CENTRES[3]), tl.constexpr(CENTRES[4])
_TINY = tl.constexpr(TINY)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def _bytes(high: bool, numbers: Iterable[float]) -> str:
    """Of eight fp16 numbers, the high or the low byte of each, as two words for PTX's prmt."""
    picked = [struct.pack("<e", number)[int(high)] for number in numbers]
    words = (int.from_bytes(bytes(picked[n : n + 4]), "little") for n in (0, 4))
    return ", ".join(f"0x{word:08x}" for word in words)


# Of words with eight codes of 4 bits each: fp16 numbers, two to a register. A code picks bytes from a table.
_SPREAD = (  # codes of 3 bits to 4
    "and.b32 a, w, 0xfff; and.b32 b, w, 0xfff000; shl.b32 b, b, 4; or.b32 w, a, b;"
    " and.b32 a, w, 0x3f003f; and.b32 b, w, 0xfc00fc0; shl.b32 b, b, 2; or.b32 w, a, b;"
    " and.b32 a, w, 0x7070707; and.b32 b, w, 0x38383838; shl.b32 b, b, 1; or.b32 w, a, b;"
)
_PAIRS = (  # the bytes of four numbers become two registers
    "prmt.b32 a, low, high, 0x5140; mov.b32 {{${0}, ${1}}}, a;"
    " prmt.b32 a, low, high, 0x7362; mov.b32 {{${2}, ${3}}}, a;"
)
_TO_CENTRES_3 = tl.constexpr(
    "{ .reg .b32 w, a, b, low, high; mov.b32 w, $8;" + _SPREAD + "".join(
        f"prmt.b32 low, {_bytes(False, centres(3))}, w; prmt.b32 high, {_bytes(True, centres(3))}, w;"
        + _PAIRS.format(n, n + 1, n + 2, n + 3) + "shr.u32 w, w, 16;"
        for n in (0, 4)
    ) + "}"
)  # fmt: skip
_TO_CENTRES_4 = tl.constexpr(  # mirrored sizes, then signs: of codes below 8 prmt leaves the byte 0x40
    "{ .reg .b32 w, a, rank, sign, low, high; mov.b32 w, $8;"
    " not.b32 a, w; shr.u32 a, a, 3; and.b32 a, a, 0x11111111; mul.lo.u32 a, a, 7;"
    " xor.b32 rank, w, a; and.b32 rank, rank, 0x77777777;" + "".join(
        f"prmt.b32 low, {_bytes(False, CENTRES[4])}, rank; prmt.b32 high, {_bytes(True, CENTRES[4])}, rank;"
        " mov.b32 a, 0x40404040; prmt.b32 sign, a, a, w; shl.b32 sign, sign, 1; or.b32 high, high, sign;"
        + _PAIRS.format(n, n + 1, n + 2, n + 3) + "shr.u32 w, w, 16; shr.u32 rank, rank, 16;"
        for n in (0, 4)
    ) + "}"
)  # fmt: skip
_COUNTS = (  # the fp16 number 1024 + code has the code in its lowest bits; a register has codes n and n + 4
    "mov.b32 step, {$9, $9}; mov.b32 least, {$10, $10}; mov.b32 far, 0x64006400;"
    + "".join(
        "lop3.b32 a, w, 0xf000f, far, 0xea; sub.rn.f16x2 a, a, far; fma.rn.f16x2 a, a, step, least;"
        f" mov.b32 {{${n}, ${n + 4}}}, a; shr.u32 w, w, 4;"
        for n in range(4)
    )
)
_TO_VALUES_4 = tl.constexpr("{ .reg .b32 w, a, step, least, far; mov.b32 w, $8;" + _COUNTS + "}")
_TO_VALUES_3 = tl.constexpr("{ .reg .b32 w, a, b, step, least, far; mov.b32 w, $8;" + _SPREAD + _COUNTS + "}")


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_len"])
def pack(
    q, k, v, k_pages, v_pages, page_table, rows, positions, turned, num_rows, num_tokens, table_len, q_len,
    k_len, v_len, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, L: tl.constexpr, K_BITS: tl.constexpr,
    V_BITS: tl.constexpr, LOG_D: tl.constexpr,
):  # fmt: skip
    # Grid: one program per token and head: queries and keys where keys have codes, values where they have.
    # Tile: the D numbers of a head.
    # Traffic: queries once in and once out; keys and values once in, their codes out.
    KEYS: tl.constexpr = G if K_BITS > 0 else 0
    QUERIES: tl.constexpr = KEYS * R
    PARTS: tl.constexpr = QUERIES + KEYS + (G if V_BITS > 0 else 0)
    token, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    row, _ = owner_of(rows, tl.program_id(0) // PARTS, num_rows, num_tokens)
    if row >= 0:
        position, d = tl.load(positions + token), tl.arange(0, D)
        page = tl.load(page_table + row * table_len + position // L).to(tl.int64)
        if K_BITS > 0:
            if part < QUERIES:
                value = tl.load(q + token * q_len + part * D + d).to(tl.float32)
                tl.store(turned + token * (G * R * D) + part * D + d, _rotated(value, D, LOG_D))
            elif part < QUERIES + KEYS:
                g = part - QUERIES
                value = tl.load(k + token * k_len + g * D + d).to(tl.float32)
                codes, notes = _places(k_pages, page, position % L * G + g, K_BITS, 1, G, D, L)
                _store_key(value, codes, notes, K_BITS, D, LOG_D)
        if V_BITS > 0:  # noqa: SIM102  one is known when this is compiled
            if part >= QUERIES + KEYS:
                g = part - QUERIES - KEYS
                value = tl.load(v + token * v_len + g * D + d).to(tl.float32)
                codes, notes = _places(v_pages, page, position % L * G + g, V_BITS, 2, G, D, L)
                _store_value(value, codes, notes, V_BITS, D)


@triton.jit
def _places(
    pages, page, head, BITS: tl.constexpr, NOTES: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """Where the codes of a head of a page are, and its fp16 numbers; of several heads, if these are."""
    BYTES: tl.constexpr = D // 8 * BITS
    begin = pages + page * (L * G * (BYTES + 2 * NOTES))
    notes = (begin + (L * G * BYTES + head * (2 * NOTES))).to(tl.pointer_type(tl.float16))
    return begin + head * BYTES, notes


@triton.jit
def _store_key(k, codes, notes, BITS: tl.constexpr, D: tl.constexpr, LOG_D: tl.constexpr):
    norm = tl.sqrt_rn(_sum(k * k, D, LOG_D))
    turned = _rotated(tl.div_rn(k, tl.zeros_like(k) + (norm + _TINY)), D, LOG_D)
    found = tl.zeros((D,), tl.int32)
    for i in tl.static_range((1 << BITS) - 1):
        found += (turned >= (_BORDERS_4[i] if BITS == 4 else _BORDERS_3[i])).to(tl.int32)
    centre = _centres(found, BITS)
    tl.store(notes, tl.div_rn(norm, tl.sqrt_rn(_sum(centre * centre, D, LOG_D))).to(tl.float16))
    _store_codes(codes, found, BITS, D)


@triton.jit
def _store_value(v, codes, notes, BITS: tl.constexpr, D: tl.constexpr):
    MOST: tl.constexpr = (1 << BITS) - 1
    sound = tl.sum(v - v, 0)  # NaN where a number is none, or has no end
    least = tl.min(v, 0) + sound
    step = tl.maximum(tl.div_rn(tl.max(v, 0) - least, MOST * 1.0), _TINY) + sound
    steps = tl.div_rn(v - least, tl.zeros_like(v) + step) + 0.5
    _store_codes(codes, tl.minimum(tl.maximum(steps, 0.0), MOST * 1.0).to(tl.int32), BITS, D)
    tl.store(notes, step.to(tl.float16))
    tl.store(notes + 1, least.to(tl.float16))


@triton.jit
def _store_codes(to, codes, BITS: tl.constexpr, D: tl.constexpr):
    """Eight codes in BITS bytes, the first in the lowest bits."""
    eight = tl.arange(0, D // 8)
    words = tl.sum(tl.reshape(codes, (D // 8, 8)) << (tl.arange(0, 8) * BITS)[None, :], 1)
    for i in tl.static_range(BITS):
        tl.store(to + eight * BITS + i, ((words >> (8 * i)) & 255).to(tl.uint8))


@triton.jit
def _sum(x, D: tl.constexpr, LOG_D: tl.constexpr):
    """Halves upon each other."""
    for i in tl.static_range(LOG_D):
        x = tl.sum(tl.reshape(x, (2, D >> (i + 1))), 0)
    return tl.sum(x, 0)


@triton.jit
def _rotated(x, D: tl.constexpr, LOG_D: tl.constexpr):
    """x times the Hadamard matrix, by steps of 1, 2, 4 and so on."""
    for i in tl.static_range(LOG_D):
        low, high = tl.split(tl.permute(tl.reshape(x, (D >> (i + 1), 2, 1 << i)), (0, 2, 1)))
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (D,))
    return x


@triton.jit
def _centres(codes, BITS: tl.constexpr):
    """What codes of keys stand for: sizes mirror each other around the middle."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    is_low = codes < HALF
    rank = tl.where(is_low, HALF - 1 - codes, codes - HALF)
    odd, second = (rank & 1) != 0, (rank & 2) != 0
    if BITS == 3:
        size = tl.where(
            second,
            tl.where(odd, _CENTRES_3[3], _CENTRES_3[2]),
            tl.where(odd, _CENTRES_3[1], _CENTRES_3[0]),
        )
    else:
        low = tl.where(
            second,
            tl.where(odd, _CENTRES_4[3], _CENTRES_4[2]),
            tl.where(odd, _CENTRES_4[1], _CENTRES_4[0]),
        )
        high = tl.where(
            second,
            tl.where(odd, _CENTRES_4[7], _CENTRES_4[6]),
            tl.where(odd, _CENTRES_4[5], _CENTRES_4[4]),
        )
        size = tl.where((rank & 4) != 0, high, low)
    return tl.where(is_low, -size, size)


@triton.jit
def in_fp16(q):
    """Queries as fp16 in units of their own, powers of two: the largest number of each is below 2^15."""
    exponent = tl.max(tl.abs(q.to(tl.float32)), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent, 15)  # counted from 127
    units = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * units[:, None]).to(tl.float16), ((exponent - 14) << 23).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _heads(table, page, low, real, g, G: tl.constexpr, L: tl.constexpr, TILE: tl.constexpr):
    """Of the tile from `low` on, which begins on `page`: pages, one if all are on it, and heads there."""
    place = low + tl.arange(0, TILE)
    if L % TILE == 0:
        pages = page.to(tl.int64)
    else:
        pages = tl.load(table + place // L, mask=real, other=0).to(tl.int64)
    return pages, place % L * G + g


@triton.jit
def _load_words(at, real, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """WIDTH codes from each of several addresses on, eight to a word; 0 where nothing is real."""
    eight = tl.arange(0, WIDTH // 8)
    if BITS == 4:
        ALIGNMENT: tl.constexpr = WIDTH // 2 if WIDTH < 32 else 16
        lines = tl.multiple_of(at.to(tl.pointer_type(tl.int32))[:, None], (ALIGNMENT, ALIGNMENT))
        return tl.load(lines + eight[None, :], mask=real[:, None], other=0)
    elif WIDTH >= 32:  # three words have 32 codes
        ALIGNMENT: tl.constexpr = 4
        lines = tl.multiple_of(at.to(tl.pointer_type(tl.int32))[:, None], (ALIGNMENT, ALIGNMENT))
        lines += (tl.arange(0, WIDTH // 32) * 3)[None, :]
        low = tl.load(lines, mask=real[:, None], other=0)
        middle = tl.load(lines + 1, mask=real[:, None], other=0)
        high = tl.load(lines + 2, mask=real[:, None], other=0)
        first, second = low & 0xFFFFFF, ((low >> 24) & 0xFF) | ((middle & 0xFFFF) << 8)
        third, fourth = ((middle >> 16) & 0xFFFF) | ((high & 0xFF) << 16), (high >> 8) & 0xFFFFFF
        words = tl.join(tl.join(first, third), tl.join(second, fourth))
        return tl.reshape(words, (at.shape[0], WIDTH // 8))
    else:
        at = at[:, None] + (eight * 3)[None, :]
        low = tl.load(at, mask=real[:, None], other=0).to(tl.int32)
        middle = tl.load(at + 1, mask=real[:, None], other=0).to(tl.int32)
        high = tl.load(at + 2, mask=real[:, None], other=0).to(tl.int32)
        return low | (middle << 8) | (high << 16)


@triton.jit
def _codes_of(words, BITS: tl.constexpr):
    """The codes of words, one behind the other."""
    shifts = (tl.arange(0, 8) * BITS)[None, None, :]
    codes = (words[:, :, None] >> shifts) & ((1 << BITS) - 1)
    return tl.reshape(codes, (words.shape[0], words.shape[1] * 8))


@triton.jit
def _in_a_row(a, b, c, d, e, f, g, h):
    """Eight tensors, the n-th with the n-th number of each eight."""
    even, odd = tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), (a.shape[0], a.shape[1] * 8))


@triton.jit
def _centres_of(words, BITS: tl.constexpr, dtype: tl.constexpr):
    if dtype == tl.float16 and not _INTERPRETED:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _TO_CENTRES_4 if BITS == 4 else _TO_CENTRES_3, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words],
            dtype=(tl.float16,) * 8, is_pure=False, pack=1,
        )  # fmt: skip
        return _in_a_row(a, b, c, d, e, f, g, h)
    else:
        return _centres(_codes_of(words, BITS), BITS).to(dtype)


@triton.jit
def _values_of(words, step, least, BITS: tl.constexpr, dtype: tl.constexpr):
    """Of codes and two fp16 numbers of each line."""
    if dtype == tl.float16 and not _INTERPRETED:
        step, least = (
            tl.broadcast_to(step[:, None], words.shape),
            tl.broadcast_to(least[:, None], words.shape),
        )
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _TO_VALUES_4 if BITS == 4 else _TO_VALUES_3, "=h,=h,=h,=h,=h,=h,=h,=h,r,h,h",
            [words, step, least], dtype=(tl.float16,) * 8, is_pure=False, pack=1,
        )  # fmt: skip
        return _in_a_row(a, b, c, d, e, f, g, h)
    else:
        counts = _codes_of(words, BITS).to(tl.float32)
        return (counts * step.to(tl.float32)[:, None] + least.to(tl.float32)[:, None]).to(dtype)


@triton.jit
def read_keys(
    pages, table, page, low, first, high, g, G: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
    TILE: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The centres of a tile's keys, which are turned, and sizes; 0 for places outside of first..high."""
    place = low + tl.arange(0, TILE)
    real = (place >= first) & (place < high)
    own, heads = _heads(table, page, low, real, g, G, L, TILE)
    codes, notes = _places(pages, own, heads, BITS, 1, G, D, L)
    size = tl.load(notes, mask=real, other=0.0).to(tl.float32)
    return _centres_of(_load_words(codes, real, D, BITS), BITS, dtype), size


@triton.jit
def read_values(
    pages, table, page, low, first, high, g, G: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
    TILE: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Both halves of a tile's values; 0 for places outside of first..high."""
    place = low + tl.arange(0, TILE)
    real = (place >= first) & (place < high)
    own, heads = _heads(table, page, low, real, g, G, L, TILE)
    codes, notes = _places(pages, own, heads, BITS, 2, G, D, L)
    step = tl.load(notes, mask=real, other=0.0)
    least = tl.load(notes + 1, mask=real, other=0.0)
    left = _load_words(codes, real, D // 2, BITS)
    right = _load_words(codes + D // 16 * BITS, real, D // 2, BITS)
    return _values_of(left, step, least, BITS, dtype), _values_of(right, step, least, BITS, dtype)
