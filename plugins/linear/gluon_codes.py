"""The dense layer over codes in Gluon for sm_90: a warp loads, others widen, consumers of four warps multiply.

Every output is the chain of steps of plugins/gpu/codes.py, or with inputs in e4m3 of plugins/gpu/e4m3.py, and
ends as triton.py's does, with the same bits. Triton's warps widen and multiply in turns, so that the tensor
cores stand still meanwhile; here one consumer adds up a step while another multiplies.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hemiola.plugins.gpu.codes import widened
from hemiola.plugins.gpu.dense import place_of
from hemiola.plugins.linear.gluon import _after, _end, _fetch, _store

LANES = gl.constexpr(16)  # outputs whose words lie side by side
SLAB = gl.constexpr(64)  # outputs of a consumer: the rows of its instruction
PART = gl.constexpr(64)  # tokens that are stored at once


@gluon.jit(do_not_specialize=["num_tokens", "num_outputs", "num_inputs"])
def _dense_coded(x, words, scales, zeros, factors, bias, residual, y, num_tokens, num_outputs, num_inputs,
                 KIND: gl.constexpr, HALF: gl.constexpr, STEP: gl.constexpr, SCALED: gl.constexpr,
                 ZEROS: gl.constexpr, DIVIDES: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
                 CODES: gl.constexpr, WIDENERS: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr,
                 ACTIVATION: gl.constexpr, BIASED: gl.constexpr, ADDS: gl.constexpr):  # fmt: skip
    # Grid: one program per multiprocessor, which walks over tiles; x, words, residual and y are descriptors.
    # Tile: [CONSUMERS * 64 outputs, tokens of x's box], the whole inner dimension.
    # Traffic: codes once per token tile and x once per output tile, mostly from L2; y once.
    # It begins by waiting for the kernels before it (plugins/gpu/overlap.py): nothing is fetched early.
    TOKENS: gl.constexpr = x.block_shape[0]
    UNIT: gl.constexpr = x.block_shape[1]
    PARTS: gl.constexpr = TOKENS // PART if ADDS else 1
    OUTPUTS: gl.constexpr = CONSUMERS * SLAB
    lines: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUTPUTS, UNIT], x.dtype)
    codes = gl.allocate_shared_memory(words.dtype, [CODES, OUTPUTS // LANES, LANES, HALF], words.layout)
    a = gl.allocate_shared_memory(x.dtype, [STAGES, OUTPUTS, UNIT], lines)
    b = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, UNIT], x.layout)
    out = gl.allocate_shared_memory(y.dtype, [CONSUMERS * PARTS, PART, y.block_shape[1]], y.layout)
    there = gl.allocate_shared_memory(gl.int64, [CODES, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [CODES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(CODES):
        mbarrier.init(there.index(stage), count=1)
        mbarrier.init(taken.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=2)  # inputs were brought, codes were widened
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    for slab in gl.static_range(CONSUMERS):
        mbarrier.init(added.index(slab), count=1)
    fence_async_shared()
    stages, turns, ends = (a, b, ready, empty), (codes, there, taken), (bias, residual, y, out, added)
    sizes = (gl.cdiv(num_outputs, OUTPUTS), gl.cdiv(num_tokens, TOKENS), num_inputs)
    beside = (scales, zeros, factors)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_add, (0, ends, stages, sizes, beside, num_outputs, KIND, HALF, STEP, SCALED, DIVIDES, GROUP,
                     ACTIVATION, BIASED, ADDS)),
             (_widen, (stages, turns, sizes, beside, num_outputs, KIND, STEP, SCALED, ZEROS, WIDENERS, GROUP)),
             (_load_codes, (x, words, stages, turns, sizes, KIND, GROUP))],
            [WIDENERS, 1], [96, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_add, (0, ends, stages, sizes, beside, num_outputs, KIND, HALF, STEP, SCALED, DIVIDES, GROUP,
                     ACTIVATION, BIASED, ADDS)),
             (_add, (1, ends, stages, sizes, beside, num_outputs, KIND, HALF, STEP, SCALED, DIVIDES, GROUP,
                     ACTIVATION, BIASED, ADDS)),
             (_widen, (stages, turns, sizes, beside, num_outputs, KIND, STEP, SCALED, ZEROS, WIDENERS, GROUP)),
             (_load_codes, (x, words, stages, turns, sizes, KIND, GROUP))],
            [4, WIDENERS, 1], [REGISTERS, 72, 24],
        )  # fmt: skip


@gluon.constexpr_function
def parts_of(kind):
    """Codes of a word."""
    return 2 if kind in ("e4m3", "int8") else 4


@gluon.jit
def _load_codes(x, words, stages, turns, sizes, KIND: gl.constexpr, GROUP: gl.constexpr):
    """The warp that loads: codes of a block as soon as they have room, inputs unit by unit."""
    a, b, ready, empty = stages
    codes, there, taken = turns
    num_output_tiles, num_token_tiles, num_inputs = sizes
    STAGES: gl.constexpr = b.shape[0]
    TOKENS: gl.constexpr = b.shape[1]
    UNIT: gl.constexpr = b.shape[2]
    CODES: gl.constexpr = codes.shape[0]
    SLABS: gl.constexpr = codes.shape[1]
    HALF: gl.constexpr = codes.shape[3]
    BLOCK: gl.constexpr = parts_of(KIND) * HALF
    UNITS: gl.constexpr = BLOCK // UNIT
    num_blocks = gl.cdiv(num_inputs, BLOCK)
    stage, phase, turn, turn_phase = 0, 1, 0, 1  # of a new barrier the phase before the first has ended
    for tile in range(gl.program_id(0), num_output_tiles * num_token_tiles, gl.num_programs(0)):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        for block in range(num_blocks):
            bar = there.index(turn)
            mbarrier.wait(taken.index(turn), turn_phase)
            mbarrier.expect(bar, SLABS * LANES * HALF * 2)
            place = [output_tile * SLABS, block * LANES, 0]
            tma.async_copy_global_to_shared(words, place, bar, codes.index(turn))
            turn, turn_phase = _after(turn, turn_phase, CODES)
            for unit in gl.static_range(UNITS):
                bar = ready.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, TOKENS * UNIT * 2)
                place = [token_tile * TOKENS, block * BLOCK + unit * UNIT]
                tma.async_copy_global_to_shared(x, place, bar, b.index(stage))
                stage, phase = _after(stage, phase, STAGES)


@gluon.jit
def _widen(stages, turns, sizes, beside, num_outputs, KIND: gl.constexpr, STEP: gl.constexpr,
           SCALED: gl.constexpr, ZEROS: gl.constexpr, WARPS: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Warps that make bf16 numbers of codes, a unit of inputs for every consumer at a time."""
    a, b, ready, empty = stages
    codes, there, taken = turns
    scales, zeros, factors = beside
    num_output_tiles, num_token_tiles, num_inputs = sizes
    STAGES: gl.constexpr = b.shape[0]
    UNIT: gl.constexpr = b.shape[2]
    CODES: gl.constexpr = codes.shape[0]
    SLABS: gl.constexpr = codes.shape[1]
    HALF: gl.constexpr = codes.shape[3]
    BLOCK: gl.constexpr = parts_of(KIND) * HALF
    SPANS: gl.constexpr = BLOCK // STEP
    EACH: gl.constexpr = UNIT // HALF  # parts of a unit
    over: gl.constexpr = WARPS if WARPS < SLABS else SLABS
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // HALF, HALF // 8], [over, WARPS // over, 1], [2, 1, 0]
    )
    lanes: gl.constexpr = gl.SliceLayout(2, layout)
    slab = gl.expand_dims(gl.arange(0, SLABS, gl.SliceLayout(1, lanes)), 1)
    lane = gl.expand_dims(gl.arange(0, LANES, gl.SliceLayout(0, lanes)), 0)
    num_blocks, num_slabs = gl.cdiv(num_inputs, BLOCK), gl.cdiv(num_outputs, LANES)
    stage, phase, turn, turn_phase = 0, 1, 0, 0
    for tile in range(gl.program_id(0), num_output_tiles * num_token_tiles, gl.num_programs(0)):
        output_tile, _ = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        row = gl.minimum(output_tile * SLABS + slab, num_slabs - 1)
        at = row.to(gl.int64) * (num_blocks * SPANS * LANES) + lane
        next_scale, next_zero = 0, gl.load(zeros + row * LANES + lane) if ZEROS and not SCALED else 0
        if KIND == "e2m1":
            next_scale = gl.load(scales + at)  # a block early: nothing waits for it
        if ZEROS and SCALED:
            next_zero = gl.load(zeros + at)
        scale, zero = next_scale, next_zero
        for block in range(num_blocks):
            mbarrier.wait(there.index(turn), turn_phase)
            word = codes.index(turn).load(layout)
            mbarrier.arrive(taken.index(turn))
            turn, turn_phase = _after(turn, turn_phase, CODES)
            scale, zero = next_scale, next_zero
            more = gl.minimum(block + 1, num_blocks - 1) * (SPANS * LANES)
            if KIND == "e2m1":
                next_scale = gl.load(scales + at + more)
            if ZEROS and SCALED:
                next_zero = gl.load(zeros + at + more)
            for unit in gl.static_range(BLOCK // UNIT):
                if ZEROS and SCALED and unit * UNIT // STEP > 0:
                    zero = gl.load(zeros + at + (block * SPANS + unit * UNIT // STEP) * LANES)
                mbarrier.wait(empty.index(stage), phase)
                _store_unit(a.index(stage), word, zero, scale, unit * EACH, EACH, KIND, ZEROS)
                fence_async_shared()
                mbarrier.arrive(ready.index(stage))
                stage, phase = _after(stage, phase, STAGES)


@gluon.jit
def _store_unit(place, word, zero, scale, FIRST: gl.constexpr, EACH: gl.constexpr, KIND: gl.constexpr,
                ZEROS: gl.constexpr):  # fmt: skip
    """EACH parts of words [slabs, LANES, HALF], side by side."""
    ROWS: gl.constexpr = word.shape[0] * LANES
    WIDE: gl.constexpr = word.shape[2] * EACH
    p = widened(word, zero, scale, 1.0, FIRST, KIND, ZEROS, False, gl.bfloat16)
    if EACH == 1:
        place.store(p.reshape(ROWS, WIDE))
    else:
        q = widened(word, zero, scale, 1.0, FIRST + 1, KIND, ZEROS, False, gl.bfloat16)
        if EACH == 2:
            place.store(gl.join(p, q).permute(0, 1, 3, 2).reshape(ROWS, WIDE))
        else:
            r = widened(word, zero, scale, 1.0, FIRST + 2, KIND, ZEROS, False, gl.bfloat16)
            s = widened(word, zero, scale, 1.0, FIRST + 3, KIND, ZEROS, False, gl.bfloat16)
            four = gl.join(gl.join(p, q), gl.join(r, s))
            place.store(four.permute(0, 1, 4, 3, 2).reshape(ROWS, WIDE))


@gluon.jit
def _add(slab: gl.constexpr, ends, stages, sizes, beside, num_outputs, KIND: gl.constexpr, HALF: gl.constexpr,
         STEP: gl.constexpr, SCALED: gl.constexpr, DIVIDES: gl.constexpr, GROUP: gl.constexpr,
         ACTIVATION: gl.constexpr, BIASED: gl.constexpr, ADDS: gl.constexpr):  # fmt: skip
    """Four warps: a slab's products, step by step, and what ends them."""
    a, b, ready, empty = stages
    bias, residual, y, out, added = ends
    scales, zeros, factors = beside
    num_output_tiles, num_token_tiles, num_inputs = sizes
    STAGES: gl.constexpr = b.shape[0]
    CONSUMERS: gl.constexpr = a.shape[1] // SLAB
    TOKENS: gl.constexpr = b.shape[1]
    UNIT: gl.constexpr = b.shape[2]
    PARTS: gl.constexpr = out.shape[0] // CONSUMERS
    BLOCK: gl.constexpr = parts_of(KIND) * HALF
    num_steps = gl.cdiv(num_inputs, BLOCK) * (BLOCK // STEP)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    stage, phase, turn = 0, 0, 0
    for tile in range(gl.program_id(0), num_output_tiles * num_token_tiles, gl.num_programs(0)):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        first_token, row = token_tile * TOKENS, (output_tile * CONSUMERS + slab) * SLAB
        column = row * y.block_shape[1] // SLAB
        if ADDS:
            _fetch(residual, out, slab * PARTS, PARTS, added.index(slab), first_token, column)
        output = gl.minimum(row + gl.arange(0, SLAB, gl.SliceLayout(1, layout)), num_outputs - 1)
        scale_at = scales + (output // LANES).to(gl.int64) * (num_steps * LANES) + output % LANES
        total = gl.zeros((SLAB, TOKENS), gl.float32, layout)
        sums = gl.zeros((SLAB, TOKENS), gl.float32, layout)
        for step in range(num_steps):
            if SCALED:
                scale = gl.load(scale_at + step * LANES)
            for unit in gl.static_range(STEP // UNIT):
                mbarrier.wait(ready.index(stage), phase)
                left, right = a.index(stage).slice(slab * SLAB, SLAB), b.index(stage).permute((1, 0))
                sums = warpgroup_mma(left, right, sums, use_acc=unit > 0, is_async=True)
                if unit + 1 < STEP // UNIT:
                    stage, phase = _after(stage, phase, STAGES)
            sums = warpgroup_mma_wait(0, (sums,))
            if STEP // UNIT == 2:
                mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
            mbarrier.arrive(empty.index(stage))
            stage, phase = _after(stage, phase, STAGES)
            total = total + (sums * scale[:, None] if SCALED else sums)
        if not SCALED:
            total = _times(total, gl.load(factors + output), KIND, DIVIDES)
        total = _end(total, bias, row, num_outputs, ACTIVATION, BIASED)
        if ADDS:
            mbarrier.wait(added.index(slab), turn)
            turn ^= 1
        _store(total, y, out, slab * PARTS, first_token, column, ADDS)
    tma.store_wait(0)


@gluon.jit
def _times(total, factor, KIND: gl.constexpr, DIVIDES: gl.constexpr):
    """A slab's sums and what its rows share."""
    if KIND == "e2m1":
        total = total * 65536.0
    if DIVIDES:
        return gl.div_rn(total, gl.expand_dims(factor, 1).broadcast_to(total.shape))
    else:
        return total * factor[:, None]


@gluon.jit(do_not_specialize=["num_tokens", "num_outputs", "width", "span"])
def _dense_e4m3(codes, by, weight, scales, bias, residual, y, num_tokens, num_outputs, width, span,
                BY_GROUP: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
                REGISTERS: gl.constexpr, ACTIVATION: gl.constexpr, BIASED: gl.constexpr,
                ADDS: gl.constexpr):  # fmt: skip
    # Grid, tile, traffic: those of _dense_coded; codes, weight, residual and y are descriptors.
    TOKENS: gl.constexpr = codes.block_shape[0]
    STEP: gl.constexpr = codes.block_shape[1]
    PARTS: gl.constexpr = TOKENS // PART if ADDS else 1
    a = gl.allocate_shared_memory(weight.dtype, [STAGES * CONSUMERS, SLAB, STEP], weight.layout)
    b = gl.allocate_shared_memory(codes.dtype, [STAGES, TOKENS, STEP], codes.layout)
    out = gl.allocate_shared_memory(y.dtype, [CONSUMERS * PARTS, PART, y.block_shape[1]], y.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    for slab in gl.static_range(CONSUMERS):
        mbarrier.init(added.index(slab), count=1)
    fence_async_shared()
    stages, ends = (a, b, ready, empty), (bias, residual, y, out, added)
    sizes = (gl.cdiv(num_outputs, CONSUMERS * SLAB), gl.cdiv(num_tokens, TOKENS), width)
    beside = (by, scales, span, num_tokens, num_outputs)
    gl.warp_specialize(
        [(_promote, (0, ends, stages, sizes, beside, BY_GROUP, GROUP, ACTIVATION, BIASED, ADDS)),
         (_promote, (1, ends, stages, sizes, beside, BY_GROUP, GROUP, ACTIVATION, BIASED, ADDS)),
         (_load_e4m3, (codes, weight, stages, sizes, GROUP))],
        [4, 1], [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def _load_e4m3(codes, weight, stages, sizes, GROUP: gl.constexpr):
    """The warp that loads."""
    a, b, ready, empty = stages
    num_output_tiles, num_token_tiles, width = sizes
    STAGES: gl.constexpr = b.shape[0]
    CONSUMERS: gl.constexpr = a.shape[0] // STAGES
    TOKENS: gl.constexpr = b.shape[1]
    STEP: gl.constexpr = b.shape[2]
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), num_output_tiles * num_token_tiles, gl.num_programs(0)):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        for start in range(0, width, STEP):
            bar = ready.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, (CONSUMERS * SLAB + TOKENS) * STEP)
            for slab in gl.static_range(CONSUMERS):
                row = (output_tile * CONSUMERS + slab) * SLAB
                tma.async_copy_global_to_shared(weight, [row, start], bar, a.index(stage * CONSUMERS + slab))
            tma.async_copy_global_to_shared(codes, [token_tile * TOKENS, start], bar, b.index(stage))
            stage, phase = _after(stage, phase, STAGES)


@gluon.jit
def _promote(slab: gl.constexpr, ends, stages, sizes, beside, BY_GROUP: gl.constexpr, GROUP: gl.constexpr,
             ACTIVATION: gl.constexpr, BIASED: gl.constexpr, ADDS: gl.constexpr):  # fmt: skip
    """Four warps: a slab's products of e4m3, step by step, and what ends them."""
    a, b, ready, empty = stages
    bias, residual, y, out, added = ends
    by, scales, span, num_tokens, num_outputs = beside
    num_output_tiles, num_token_tiles, width = sizes
    STAGES: gl.constexpr = b.shape[0]
    CONSUMERS: gl.constexpr = a.shape[0] // STAGES
    TOKENS: gl.constexpr = b.shape[1]
    STEP: gl.constexpr = b.shape[2]
    PARTS: gl.constexpr = out.shape[0] // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    stage, phase, turn = 0, 0, 0
    for tile in range(gl.program_id(0), num_output_tiles * num_token_tiles, gl.num_programs(0)):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        first_token, row = token_tile * TOKENS, (output_tile * CONSUMERS + slab) * SLAB
        column = row * y.block_shape[1] // SLAB
        if ADDS:
            _fetch(residual, out, slab * PARTS, PARTS, added.index(slab), first_token, column)
        output = gl.minimum(row + gl.arange(0, SLAB, gl.SliceLayout(1, layout)), num_outputs - 1)
        token = gl.minimum(first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, layout)), num_tokens - 1)
        by_at, scale_at = by + token, scales + output
        total = gl.zeros((SLAB, TOKENS), gl.float32, layout)
        sums = gl.zeros((SLAB, TOKENS), gl.float32, layout)
        for start in range(0, width, STEP):
            scale = gl.load(scale_at + (start // span).to(gl.int64) * num_outputs)
            each = gl.load(by_at + (start // STEP * num_tokens if BY_GROUP else 0))
            mbarrier.wait(ready.index(stage), phase)
            left, right = a.index(stage * CONSUMERS + slab), b.index(stage).permute((1, 0))
            sums = warpgroup_mma(left, right, sums, use_acc=False, is_async=True)
            sums = warpgroup_mma_wait(0, (sums,))
            mbarrier.arrive(empty.index(stage))
            stage, phase = _after(stage, phase, STAGES)
            total = total + sums * each[None, :] * scale[:, None]
        total = _end(total, bias, row, num_outputs, ACTIVATION, BIASED)
        if ADDS:
            mbarrier.wait(added.index(slab), turn)
            turn ^= 1
        _store(total, y, out, slab * PARTS, first_token, column, ADDS)
    tma.store_wait(0)
