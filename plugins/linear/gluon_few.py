"""The dense layer over codes of 4 bits for up to eight tokens in Gluon for sm_90: from memory to registers.

Every output is the chain of plugins/gpu/codes.py and ends as triton.py's does, with the same bits. Each warp
has steps of its own, and nothing of a weight passes through shared memory: only sums do. The sixteen inputs
of a product lie among the threads so that each loads eight bytes of a row: the tensor cores of sm_90 add all
sixteen at once, and their order among themselves is free.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hemiola.plugins.gpu.activations import relu2
from hemiola.plugins.gpu.codes import instructions
from hemiola.plugins.linear.gluon import _open_eights
from hemiola.plugins.linear.gluon_steps import _times

SLAB = gl.constexpr(16)  # outputs of a product
EIGHT = gl.constexpr(8)  # tokens of a product
OPERANDS = gl.constexpr(",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 16))  # of two products


@gluon.constexpr_function
def _products(name, has_zeros, part, is_same):
    """PTX of two products of sixteen inputs each: of a part of two lanes' words, or of two parts of the same.

    Operands, four registers each: sums, sums before, words, words, inputs, and what the numbers of rows r
    (the first) and r + 8 (the third) are multiplied with, or what they are less by.
    """
    text = "{ .reg .b32 a0, a1, a2, a3, t, u, v, e0, e1; .reg .f32 d0, d1, d2, d3; .reg .b16 f0, f1, g0, g1; "
    for row in range(2 if name == "e2m1" else 0):  # 2^110 times the scales of both products' inputs
        text += f"prmt.b32 e{row}, ${20 + 2 * row}, 0, {0x4040 + part + (part + 1 << 8):#x}; "
        text += f"mad.lo.u32 e{row}, e{row}, 16, 0x6e806e80; mov.b32 {{f{row}, g{row}}}, e{row}; "
    for turn in range(2):
        now = part + 1 if turn and is_same else part
        for row in range(2):
            if name == "e2m1":
                scale = "fg"[turn]
                text += f"mov.b32 e{row}, {{{scale}{row}, {scale}{row}}}; "
            elif has_zeros:
                text += f"mov.b32 e{row}, ${20 + 2 * row}; "
        for at in range(4):  # rows r and r + 8, then the same for the other inputs
            word = (8 if is_same or not turn else 12) + (0, 2, 1, 3)[at]
            how = instructions("int4 and 136" if has_zeros else name, now)
            how = how.replace("$0", f"a{at}").replace("$1", f"${word}")
            text += how.replace(".reg .b32 t, u, v; ", "").strip("{ }") + " "
            if name == "e2m1":
                text += f"mul.rn.bf16x2 a{at}, a{at}, e{at % 2}; "
            elif has_zeros:
                text += f"sub.rn.bf16x2 a{at}, a{at}, e{at % 2}; "
        after, before = ("$0, $1, $2, $3", "d0, d1, d2, d3") if turn else ("d0, d1, d2, d3", "$4, $5, $6, $7")
        text += (
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{after}}}, {{a0, a1, a2, a3}}, "
            f"{{${16 + 2 * turn}, ${17 + 2 * turn}}}, {{{before}}}; "
        )
    return text + "}"


@gluon.constexpr_function
def _owned(warps):
    """Of 16 outputs and 8 tokens outputs r and r + 8 are a thread's."""
    spare = [[0, 0]] * (warps.bit_length() - 2)
    lanes = [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[4, 0], *spare], [], [16, 8])


@gluon.jit(do_not_specialize=["num_tokens"])
def _coded_few(x, words, scales, zeros, factors, bias, residual, best, y, num_tokens, num_outputs, num_inputs,
               x_len, residual_len, y_len, KIND: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr,
               SCALED: gl.constexpr, ZEROS: gl.constexpr, DIVIDES: gl.constexpr, WHOLE: gl.constexpr,
               SLABS: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr, ACTIVATION: gl.constexpr,
               BIASED: gl.constexpr, ADDS: gl.constexpr):  # fmt: skip
    # Grid: token tiles x programs that walk over output tiles, neighbours in the same codes.
    # Tile: [SLABS * 16 outputs, 8 tokens], the whole inner dimension; a warp has every WARPS-th step.
    # Traffic: codes and scales once per token tile, x once per output tile (from L2), y once.
    # AHEAD: steps of a warp whose words and inputs are on their way; WHOLE: num_inputs fills its blocks.
    BLOCK: gl.constexpr = PARTS * HALF
    lines: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0])  # four of every thread's
    owned: gl.constexpr = _owned(WARPS)
    thread = gl.arange(0, 32 * WARPS, gl.SliceLayout(1, lines))
    four = gl.arange(0, 4, gl.SliceLayout(0, lines))
    warp, row, place = thread // 32, thread % 32 // 4, thread % 4
    num_blocks, last_slab = gl.cdiv(num_inputs, BLOCK), (num_outputs - 1) // SLAB
    first_slab = gl.program_id(1) * SLABS
    token = gl.program_id(0) * EIGHT + row
    # pairs of words, or of inputs: rows r and r + 8 of words, inputs i and i + 16
    inner = (place * 2)[:, None] + (four % 2)[None, :]
    word_at = words.to(gl.pointer_type(gl.int32), bitcast=True) + (
        (row * (HALF // 2))[:, None] + (four // 2 * (4 * HALF))[None, :] + inner
    )
    beside_at = row[:, None] + (four // 2 * 8)[None, :]
    pair = inner + (four // 2 * 8)[None, :]
    x_at = x.to(gl.pointer_type(gl.int32), bitcast=True) + (
        (token.to(gl.int64) * (x_len // 2))[:, None] + pair
    )
    live = (token < num_tokens)[:, None] & (four >= 0)[None, :]
    places, totals = (), ()
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    for _ in gl.static_range(AHEAD * SLABS):
        places += (gl.allocate_shared_memory(gl.float32, [WARPS * SLAB, EIGHT], flat),)
    for _ in gl.static_range(SLABS):
        totals += (gl.zeros((SLAB, EIGHT), gl.float32, owned),)
    next_words, next_scales, next_zeros, next_inputs = (), (), (), ()
    for n in gl.static_range(AHEAD):
        block = n * WARPS + warp
        next_inputs += (_inputs(x_at, pair, live, block, num_inputs, BLOCK, WHOLE),)
        for m in gl.static_range(SLABS):
            slab = gl.minimum(first_slab + m, last_slab)
            line = slab.to(gl.int64) * num_blocks + gl.minimum(block, num_blocks - 1)
            next_words += (_words(word_at, line, HALF),)
            next_scales += (_scales(scales, line, beside_at, KIND, SCALED),)
            next_zeros += (_zeros(zeros, line, slab, beside_at, KIND, SCALED, ZEROS),)
    first, num_rounds = 0, gl.cdiv(num_blocks, WARPS * AHEAD)
    num_tiles = gl.cdiv(gl.cdiv(last_slab + 1, SLABS) - gl.program_id(1), gl.num_programs(1))
    for _ in range(num_tiles * num_rounds):
        of_words, of_scales, of_zeros, of_inputs = next_words, next_scales, next_zeros, next_inputs
        next_words, next_scales, next_zeros, next_inputs = (), (), (), ()
        is_last = first + WARPS * AHEAD >= num_blocks  # of the tile
        next_first = gl.where(is_last, 0, first + WARPS * AHEAD)
        next_slab = gl.where(is_last, first_slab + gl.num_programs(1) * SLABS, first_slab)
        for n in gl.static_range(AHEAD):
            block = next_first + n * WARPS + warp
            next_inputs += (_inputs(x_at, pair, live, block, num_inputs, BLOCK, WHOLE),)
            for m in gl.static_range(SLABS):
                slab = gl.minimum(next_slab + m, last_slab)
                line = slab.to(gl.int64) * num_blocks + gl.where(
                    next_slab > last_slab, num_blocks - 1, gl.minimum(block, num_blocks - 1)
                )
                next_words += (_words(word_at, line, HALF),)
                next_scales += (_scales(scales, line, beside_at, KIND, SCALED),)
                next_zeros += (_zeros(zeros, line, slab, beside_at, KIND, SCALED, ZEROS),)
                sums = gl.zeros((32 * WARPS, 4), gl.float32, lines)
                scale, zero = of_scales[n * SLABS + m], of_zeros[n * SLABS + m]
                sums = _multiplied(sums, of_words[n * SLABS + m], scale, zero, of_inputs[n], KIND, ZEROS)
                if SCALED:
                    sums = sums * scale
                sums = sums.reshape(WARPS, 8, 4, 2, 2).permute(0, 3, 1, 2, 4)  # warp, half, row, token
                places[n * SLABS + m].store(sums.reshape(WARPS * SLAB, EIGHT))
        before, totals = totals, ()
        for m in gl.static_range(SLABS):
            total = before[m]
            for n in gl.static_range(AHEAD):
                for w in gl.static_range(WARPS):
                    total += places[n * SLABS + m].slice(w * SLAB, SLAB).load(owned)
            if is_last:
                _end(total, factors, bias, residual, best, y, first_slab + m, num_tokens, num_outputs,
                     residual_len, y_len, KIND, SCALED, DIVIDES, ACTIVATION, BIASED, ADDS)  # fmt: skip
            totals += (gl.where(is_last, 0.0, total),)
        first, first_slab = next_first, next_slab


@gluon.jit
def _end(total, factors, bias, residual, best, y, slab, num_tokens, num_outputs, residual_len, y_len,
         KIND: gl.constexpr, SCALED: gl.constexpr, DIVIDES: gl.constexpr, ACTIVATION: gl.constexpr,
         BIASED: gl.constexpr, ADDS: gl.constexpr):  # fmt: skip
    """What ends 16 outputs, and their places."""
    output = slab * SLAB + gl.arange(0, SLAB, gl.SliceLayout(1, total.type.layout))
    output = gl.minimum(output, num_outputs - 1)
    if not SCALED:
        total = _times(total, gl.load(factors + output), KIND, DIVIDES)
    if BIASED:
        total += gl.load(bias + output).to(gl.float32)[:, None]
    if ACTIVATION == "argmax":
        _store_best(total, y, best, slab, num_tokens, num_outputs)
    else:
        _leave(total, residual, y, slab * SLAB, num_tokens, num_outputs, residual_len, y_len, ACTIVATION,
               ADDS)  # fmt: skip


@gluon.jit
def _inputs(x_at, pair, live, block, num_inputs, BLOCK: gl.constexpr, WHOLE: gl.constexpr):
    """A step's inputs, those of two products at a time."""
    found = ()
    for start in gl.static_range(0, BLOCK, 32):
        if WHOLE:
            inside = (block * BLOCK < num_inputs)[:, None]
        else:
            inside = (block * BLOCK + start)[:, None] + pair * 2 < num_inputs
        at = x_at + (block * (BLOCK // 2) + start // 2)[:, None]
        found += (gl.load(at, mask=live & inside, other=0),)
    return found


@gluon.jit
def _words(word_at, line, HALF: gl.constexpr):
    """A step's words of sixteen outputs, sixteen at a time."""
    found = ()
    for start in gl.static_range(0, HALF, 16):
        found += (gl.load(word_at + (line * (8 * HALF) + start // 2)[:, None]),)
    return found


@gluon.jit
def _scales(scales, line, beside_at, KIND: gl.constexpr, SCALED: gl.constexpr):
    """Scales of a step, fp32; of e2m1 four in a register."""
    if SCALED or KIND == "e2m1":
        return gl.load(scales + ((line * SLAB)[:, None] + beside_at))
    else:
        return 0


@gluon.jit
def _zeros(zeros, line, slab, beside_at, KIND: gl.constexpr, SCALED: gl.constexpr, ZEROS: gl.constexpr):
    """Zero points of a step and 136, each twice, bf16."""
    if ZEROS:
        if SCALED:
            zero = gl.load(zeros + ((line * SLAB)[:, None] + beside_at))
        else:
            zero = gl.load(zeros + (slab * SLAB + beside_at))
        bits = (zero + 136).to(gl.float32).to(gl.int32, bitcast=True)
        return bits | ((bits >> 16) & 0xFFFF)
    else:
        return 0


@gluon.jit
def _multiplied(sums, words, scale, zero, inputs, KIND: gl.constexpr, ZEROS: gl.constexpr):
    """A step's sums: all of the words' first codes, then the second ones, and so on."""
    is_same: gl.constexpr = len(words) == 1
    for pair in gl.static_range(len(inputs)):
        word = words[2 * pair % len(words)]
        other = word if is_same else words[2 * pair % len(words) + 1]
        beside = scale if KIND == "e2m1" else zero if ZEROS else word
        sums = gl.inline_asm_elementwise(
            _products(KIND, ZEROS, 2 * pair // len(words), is_same), OPERANDS,
            [sums, word, other, inputs[pair], beside], dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    return sums


@gluon.jit
def _store_best(total, values, outputs, part, num_tokens, num_outputs):
    """Stores the best of a tile's outputs and its value, [parts, T]; as dense.py's best_of finds them."""
    layout: gl.constexpr = total.type.layout
    OUTPUTS: gl.constexpr = total.shape[0]
    output = part * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    value = total.to(gl.bfloat16).to(gl.float32)
    value = gl.where(value == value, value, float("inf"))
    value = gl.where((output < num_outputs)[:, None], value, float("-inf"))
    best = gl.max(value, axis=0)
    is_best = (value == best[None, :]) & (output < num_outputs)[:, None]
    first = gl.min(gl.where(is_best, output[:, None], 2147483647), axis=0)
    token = gl.program_id(0) * EIGHT + gl.arange(0, EIGHT, gl.SliceLayout(0, layout))
    at, live = part.to(gl.int64) * num_tokens + token, (token < num_tokens) & (part * OUTPUTS < num_outputs)
    gl.store(values + at, best, mask=live)
    gl.store(outputs + at, first, mask=live)


@gluon.jit
def _leave(total, residual, y, row, num_tokens, num_outputs, residual_len, y_len, ACTIVATION: gl.constexpr,
           ADDS: gl.constexpr):  # fmt: skip
    """Ends a tile [outputs from `row` on, tokens] and stores it."""
    halved: gl.constexpr = 2 if ACTIVATION == "swiglu" else 1
    if ACTIVATION == "relu2":
        total = relu2(total)
    elif ACTIVATION == "swiglu":
        total = _open_eights(total)
    layout: gl.constexpr = total.type.layout
    column = row // halved + gl.arange(0, total.shape[0], gl.SliceLayout(1, layout))
    token = gl.program_id(0).to(gl.int64) * EIGHT + gl.arange(0, EIGHT, gl.SliceLayout(0, layout))
    inside = (column < num_outputs // halved)[:, None] & (token < num_tokens)[None, :]
    if ADDS:
        at = residual + (token * residual_len)[None, :] + column[:, None]
        total += gl.load(at, mask=inside, other=0.0).to(gl.float32)
    gl.store(y + (token * y_len)[None, :] + column[:, None], total.to(y.dtype.element_ty), mask=inside)
