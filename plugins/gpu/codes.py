"""Chains of sums over quantised weights in Triton: how a tile's codes become numbers, where scales enter.

A code is widened to bf16 exactly, e2m1 times its e4m3 scale, which bf16 holds exactly, too. The law of an
output: the products of each STEP inputs are summed from zero, sixteen at a time and in order (dense.py);
the sum is multiplied with the span's scale, if spans have any, and added to the sums before it; what a whole
row shares is multiplied with the row's sum. The layout alone decides of STEP (words.py), so bits depend
neither on tiles nor on who sums: warps may take steps side by side. With fp32 activations a weight is the
fp32 number of `groups.dequantised` instead, and its chain is that of the fp32 layer.
"""

import triton
import triton.language as tl
from triton import knobs

from hemiola.plugins.gpu.early import wait

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
SLAB = tl.constexpr(16)  # outputs whose words lie side by side


@triton.constexpr_function
def instructions(name, part):
    """PTX that makes two bf16 numbers of a part of two words: what brings it to its place, then the rest."""
    nibbles = ("mov.b32 t, $1;", "shr.b32 t, $1, 4;", "shr.b32 t, $1, 8;", "shr.b32 t, $1, 12;")
    moves, rest = {
        "e4m3": (  # bits of the code where bf16 has its exponent and mantissa, times 2^120
            ("shl.b32 t, $1, 8;", "mov.b32 t, $1;"),
            "shr.b32 u, t, 4; and.b32 u, u, 0x07f007f0; lop3.b32 u, t, 0x80008000, u, 0xea;"
            " mov.b32 t, 0x7b807b80; mov.b32 v, 0x80008000; fma.rn.bf16x2 $0, u, t, v;",
        ),
        "int8": (  # 128 and the lower seven bits, less 128 and, where the sign is set, 128 more
            ("mov.b32 t, $1;", "shr.b32 t, $1, 8;"),
            "lop3.b32 u, t, 0x007f007f, 0x43004300, 0xea; lop3.b32 v, t, 0x00800080, 0x43004300, 0xea;"
            " xor.b32 v, v, 0x80008000; mov.b32 t, 0x3f803f80; fma.rn.bf16x2 $0, u, t, v;",
        ),
        "int4 and 136": (nibbles, "lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea;"),
        "int4": (
            nibbles,
            "lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; mov.b32 u, 0x3f803f80; mov.b32 v, 0xc308c308;"
            " fma.rn.bf16x2 $0, t, u, v;",
        ),
        "e2m1": (  # 2^-126 times the code: its bits where bf16 has them (words.py, spread)
            ("mov.b32 t, $1;", "shl.b32 t, $1, 3;", "shl.b32 t, $1, 6;",
             "shr.b32 t, $1, 3; and.b32 t, t, 0x01800180; shr.b32 u, $1, 7;"
             " lop3.b32 t, u, 0x00400040, t, 0xea; shl.b32 u, $1, 1; lop3.b32 t, u, 0x80008000, t, 0xea;"),
            "mov.b32 $0, t;" if part == 3 else "and.b32 $0, t, 0x81c081c0;",
        ),
    }[name]  # fmt: skip
    return "{ .reg .b32 t, u, v; " + moves[part] + " " + rest + " }"


@triton.jit
def coded_chain(x_lines, live, words, scales, zeros, factors, row, num_inputs, KIND: tl.constexpr,
                HALF: tl.constexpr, STEP: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr,
                DIVIDES: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr, TOKENS: tl.constexpr,
                OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr, ABREAST: tl.constexpr):  # fmt: skip
    """The sums of the rows `row` of a packed weight and the lines of x, [OUTPUTS, TOKENS] fp32.

    BLOCKS: those of a turn of the loop, which warps multiply side by side if ABREAST. WHOLE: num_inputs fills
    its turns.
    """
    if ABREAST:
        total = _abreast(x_lines, live, words, scales, zeros, factors, row, num_inputs, KIND, HALF, SCALED,
                         ZEROS, DIVIDES, WHOLE, DTYPE, TOKENS, OUTPUTS, BLOCKS)  # fmt: skip
    else:
        total = _in_turn(x_lines, live, words, scales, zeros, factors, row, num_inputs, KIND, HALF, STEP,
                         SCALED, ZEROS, DIVIDES, WHOLE, DTYPE, TOKENS, OUTPUTS, BLOCKS)  # fmt: skip
    if SCALED or tl.float32 == DTYPE:
        return total
    factor = tl.load(factors + row)
    if KIND == "e2m1" and not INTERPRETED and tl.bfloat16 == DTYPE:
        total = total * 65536.0
    if DIVIDES:
        return tl.div_rn(total, tl.broadcast_to(factor[:, None], (OUTPUTS, TOKENS)))
    else:
        return total * factor[:, None]


@triton.jit
def _in_turn(x_lines, live, words, scales, zeros, factors, row, num_inputs, KIND: tl.constexpr,
             HALF: tl.constexpr, STEP: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr,
             DIVIDES: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr, TOKENS: tl.constexpr,
             OUTPUTS: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """One step after the other."""
    PARTS: tl.constexpr = 2 if KIND == "e4m3" or KIND == "int8" else 4
    BLOCK: tl.constexpr = PARTS * HALF
    SPANS: tl.constexpr = BLOCK // STEP  # of a block
    EACH: tl.constexpr = PARTS // SPANS  # parts of a span
    inner, num_blocks = tl.arange(0, HALF), tl.cdiv(num_inputs, BLOCK)
    slab, lane = (row // SLAB).to(tl.int64), row % SLAB
    word_at = (words + slab * (num_blocks * (SLAB * HALF)) + lane * HALF)[:, None] + inner[None, :]
    next_at = slab * (num_blocks * (SPANS * SLAB)) + lane
    x_at = x_lines[:, None] + inner[None, :]
    factor = 1.0 if SCALED else tl.load(factors + row)
    next_scale = tl.load(scales + next_at) if SCALED else factor  # a span early: nothing waits for it
    row_zero = tl.load(zeros + row) if ZEROS and not SCALED else 0
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for first in range(0, num_blocks, BLOCKS):
        for n in tl.static_range(BLOCKS):
            block = first + n
            if WHOLE:
                word = tl.load(word_at + block * (SLAB * HALF))
            else:
                word = tl.load(word_at + block * (SLAB * HALF), mask=block < num_blocks, other=0)
            for span in tl.static_range(SPANS):
                scale, zero = next_scale, row_zero
                if KIND == "e2m1":
                    scale = tl.load(scales + next_at + block * SLAB, mask=block < num_blocks, other=0)
                if SCALED:
                    if ZEROS:
                        zero = tl.load(zeros + next_at, mask=block < num_blocks, other=0)
                    next_at += SLAB
                    more = block * SPANS + span + 1 < num_blocks * SPANS
                    next_scale = tl.load(scales + next_at, mask=more, other=0)
                step = total if tl.float32 == DTYPE else tl.zeros((OUTPUTS, TOKENS), tl.float32)
                for each in tl.static_range(EACH):
                    start = block * BLOCK + (span * EACH + each) * HALF
                    if WHOLE:
                        b = tl.load(x_at + start, mask=live[:, None], other=0.0)
                    else:
                        inside = start + inner < num_inputs
                        b = tl.load(x_at + start, mask=live[:, None] & inside[None, :], other=0.0)
                    a = widened(word, zero, scale, factor, span * EACH + each, KIND, ZEROS, DIVIDES, DTYPE)
                    step = tl.dot(a, b.T, step, input_precision="ieee")
                if tl.float32 == DTYPE:
                    total = step
                elif SCALED:
                    total = total + step * scale[:, None]
                else:
                    total = total + step
    return total


@triton.jit
def _abreast(x_lines, live, words, scales, zeros, factors, row, num_inputs, KIND: tl.constexpr,
             HALF: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr, DIVIDES: tl.constexpr,
             WHOLE: tl.constexpr, DTYPE: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
             BLOCKS: tl.constexpr):  # fmt: skip
    """BLOCKS steps of one block each side by side, for few tokens: then a row's chain is what takes time."""
    PARTS: tl.constexpr = 2 if KIND == "e4m3" or KIND == "int8" else 4
    BLOCK: tl.constexpr = PARTS * HALF
    inner, each, num_blocks = tl.arange(0, HALF), tl.arange(0, BLOCKS), tl.cdiv(num_inputs, BLOCK)
    slab, lane = (row // SLAB).to(tl.int64), row % SLAB
    word_lines = words + slab * (num_blocks * (SLAB * HALF)) + lane * HALF
    word_at = word_lines[None, :, None] + (each * (SLAB * HALF))[:, None, None] + inner[None, None, :]
    x_at = x_lines[None, None, :] + ((each * BLOCK)[:, None, None] + inner[None, :, None])
    span_at = (slab * (num_blocks * SLAB) + lane)[None, :] + (each * SLAB)[:, None]
    factor = 1.0 if SCALED else tl.load(factors + row)[None, :]
    row_zero = tl.load(zeros + row)[None, :] if ZEROS and not SCALED else 0
    next_scale = tl.load(scales + span_at, mask=(each < num_blocks)[:, None], other=0) if SCALED else factor
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for first in range(0, num_blocks, BLOCKS):
        there = first + each < num_blocks
        word = tl.load(word_at) if WHOLE else tl.load(word_at, mask=there[:, None, None], other=0)
        scale, zero = next_scale, row_zero
        if KIND == "e2m1":
            scale = tl.load(scales + span_at, mask=there[:, None], other=0)
        if ZEROS and SCALED:
            zero = tl.load(zeros + span_at, mask=there[:, None], other=0)
        span_at += BLOCKS * SLAB
        if SCALED:
            next_scale = tl.load(
                scales + span_at, mask=(first + BLOCKS + each < num_blocks)[:, None], other=0
            )
        step = tl.zeros((BLOCKS, OUTPUTS, TOKENS), tl.float32)
        for part in tl.static_range(PARTS):
            if WHOLE:
                b = tl.load(x_at + part * HALF, mask=live[None, None, :], other=0.0)
            else:
                start = (first + each) * BLOCK + part * HALF
                inside = start[:, None, None] + inner[None, :, None] < num_inputs
                b = tl.load(x_at + part * HALF, mask=inside & live[None, None, :], other=0.0)
            a = widened(word, zero, scale, factor, part, KIND, ZEROS, DIVIDES, DTYPE)
            step = tl.dot(a, b, step, input_precision="ieee")
        if SCALED:
            step = step * scale[:, :, None]
        total = _added(total, tl.permute(step, (1, 2, 0)), BLOCKS)
        word_at += BLOCKS * SLAB * HALF
        x_at += BLOCKS * BLOCK
    return total


@triton.jit
def _added(total, steps, BLOCKS: tl.constexpr):
    """Sums of two or four steps [OUTPUTS, TOKENS, BLOCKS], added in their order."""
    if BLOCKS == 4:
        early, late = tl.split(
            tl.permute(tl.reshape(steps, (total.shape[0], total.shape[1], 2, 2)), (0, 1, 3, 2))
        )
        a, b = tl.split(early)
        c, d = tl.split(late)
        return (((total + a) + b) + c) + d
    else:
        a, b = tl.split(steps)
        return (total + a) + b


@triton.jit
def unpack(words, scales, zeros, weight, slab, block, num_outputs, num_blocks, KIND: tl.constexpr,
           HALF: tl.constexpr, STEP: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Some blocks of a slab as the lines of bf16 numbers that the chain multiplies, [O, blocks * BLOCK]."""
    PARTS: tl.constexpr = 2 if KIND == "e4m3" or KIND == "int8" else 4
    SPANS: tl.constexpr = PARTS * HALF // STEP
    lane, inner, there = tl.arange(0, SLAB), tl.arange(0, HALF), (block < num_blocks)[:, None]
    line = slab.to(tl.int64) * num_blocks + block
    word_at = (line[:, None] * SLAB + lane[None, :])[:, :, None] * HALF + inner[None, None, :]
    word = tl.load(words + word_at, mask=there[:, :, None], other=0)
    row = slab * SLAB + lane
    weight_at = row.to(tl.int64)[None, :] * num_blocks + block[:, None]
    live = there[:, :, None] & (row < num_outputs)[None, :, None]
    scale, zero = 1.0, 0
    if KIND == "e2m1":
        scale = tl.load(scales + line[:, None] * SLAB + lane[None, :], mask=there, other=0)
    if ZEROS and not SCALED:
        zero = tl.load(zeros + row)[None, :]
    for part in tl.static_range(PARTS):
        if ZEROS and SCALED:
            span = line * SPANS + part * SPANS // PARTS
            zero = tl.load(zeros + span[:, None] * SLAB + lane[None, :], mask=there, other=0)
        value = widened(word, zero, scale, 1.0, part, KIND, ZEROS, False, tl.bfloat16)
        at = weight_at[:, :, None] * (PARTS * HALF) + part * HALF + inner[None, None, :]
        tl.store(weight + at, value, mask=live)


@triton.jit
def wait_for_words(words, first_output, num_outputs, num_inputs, KIND: tl.constexpr, HALF: tl.constexpr,
                   OUTPUTS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Has EARLY bytes of each of a tile's slabs brought, and waits for all kernels before."""
    BLOCK: tl.constexpr = HALF * (2 if KIND == "e4m3" or KIND == "int8" else 4)
    slab = tl.minimum(first_output // SLAB + tl.arange(0, OUTPUTS // SLAB), (num_outputs - 1) // SLAB)
    wait(words + slab.to(tl.int64) * (tl.cdiv(num_inputs, BLOCK) * (SLAB * HALF)), EARLY)


@triton.jit
def widened(word, zero, scale, factor, part: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
             DIVIDES: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """A part of words as the tensor cores take it; in fp32 the weights themselves."""
    if INTERPRETED or tl.bfloat16 != DTYPE:
        value = _number(word, part, KIND)
        if ZEROS:
            value = value - tl.expand_dims(zero.to(tl.float32), -1)
        if KIND == "e2m1":
            scale = _scale_of(scale, part)
            if tl.float32 == DTYPE:
                scale = tl.div_rn(scale, factor) if DIVIDES else scale * factor
        if KIND == "e2m1" or tl.float32 == DTYPE:
            value = value * tl.expand_dims(scale, -1)
        return value.to(DTYPE)
    elif KIND == "e2m1":
        return _pairs(word, instructions(KIND, part)) * tl.expand_dims(_raised_scale(scale, part), -1)
    elif KIND == "int4" and ZEROS:
        return _pairs(word, instructions("int4 and 136", part)) - tl.expand_dims(
            (zero.to(tl.float32) + 136.0).to(tl.bfloat16), -1
        )
    elif ZEROS:
        return _pairs(word, instructions("int8", part)) - tl.expand_dims(
            zero.to(tl.float32).to(tl.bfloat16), -1
        )
    else:
        return _pairs(word, instructions(KIND, part))


@triton.jit
def _number(word, part: tl.constexpr, KIND: tl.constexpr):
    """What a part of words stands for, fp32."""
    if KIND == "e4m3":
        code = (word.to(tl.int32) >> (8 * part)) & 255
        size = ((code & 127) << 20).to(
            tl.float32, bitcast=True
        ) * 1329227995784915872903807060280344576.0  # 2^120
        return tl.where(code & 128 != 0, -size, size)
    elif KIND == "int8":
        code = (word.to(tl.int32) >> (8 * part)) & 255
        return ((code ^ 128) - 128).to(tl.float32)
    elif KIND == "int4":
        return (((word.to(tl.int32) >> (4 * part)) & 15) - 8).to(tl.float32)
    else:
        bits = word.to(tl.int32)
        if part == 3:
            sign, code = bits >> 14, (bits >> 9) & 6 | (bits >> 13) & 1
        else:
            sign, code = bits >> (15 - 3 * part), (bits >> (6 - 3 * part)) & 7
        size = (code << 22).to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0  # 2^126
        return tl.where(sign & 1 != 0, -size, size)


@triton.jit
def _scale_of(four, part: tl.constexpr):
    """A span's scale, fp32: five bits of exponent, three of mantissa."""
    code = (four >> (8 * part)) & 255
    return ((code + (127 - 16) * 8) << 20).to(tl.float32, bitcast=True)


@triton.jit
def _raised_scale(four, part: tl.constexpr):
    """2^110 times a span's scale, bf16."""
    code = (four >> (8 * part)) & 255
    return ((code + (127 - 16 + 110) * 8) << 4).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _pairs(word, TEXT: tl.constexpr):
    """bf16 numbers of words, by these instructions: two of each in a register."""
    return tl.inline_asm_elementwise(TEXT, "=r,r", [word], dtype=tl.bfloat16, is_pure=True, pack=2)
