"""The dense layer by steps in Gluon for sm_90: a warp loads, consumers of four warps multiply and add up.

Every output is the chain of steps of plugins/gpu/codes.py, whose codes were widened before, and ends as
triton.py's does, with the same bits. One consumer adds up a step while the tensor cores have the other's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hemiola.plugins.gpu.dense import place_of
from hemiola.plugins.linear.gluon import _after, _barriers, _end, _fetch, _store

LANES = gl.constexpr(16)  # outputs whose scales lie side by side
SLAB = gl.constexpr(64)  # outputs of a consumer: the rows of its instruction
PART = gl.constexpr(64)  # tokens that are stored at once


@gluon.jit(do_not_specialize=["num_tokens", "num_outputs", "num_steps"])
def _dense_steps(x, weight, scales, factors, bias, residual, y, num_tokens, num_outputs, num_steps,
                 STEP: gl.constexpr, KIND: gl.constexpr, SCALED: gl.constexpr, DIVIDES: gl.constexpr,
                 CONSUMERS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
                 REGISTERS: gl.constexpr, ACTIVATION: gl.constexpr, BIASED: gl.constexpr,
                 ADDS: gl.constexpr):  # fmt: skip
    # Grid: one program per multiprocessor, which walks over tiles; x, weight, residual and y are descriptors.
    # Tile: [CONSUMERS * 64 outputs, tokens of x's box], the whole inner dimension.
    # Traffic: weights once per token tile and x once per output tile, mostly from L2; y once.
    # It begins by waiting for the kernels before it (plugins/gpu/overlap.py): nothing is fetched early.
    TOKENS: gl.constexpr = x.block_shape[0]
    UNIT: gl.constexpr = x.block_shape[1]
    PARTS: gl.constexpr = TOKENS // PART if ADDS else 1
    a = gl.allocate_shared_memory(weight.dtype, [STAGES * CONSUMERS, SLAB, UNIT], weight.layout)
    b = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, UNIT], x.layout)
    out = gl.allocate_shared_memory(y.dtype, [CONSUMERS * PARTS, PART, y.block_shape[1]], y.layout)
    ready, empty, added = _barriers(STAGES, CONSUMERS)
    stages, ends = (a, b, ready, empty), (bias, residual, y, out, added)
    sizes = (gl.cdiv(num_outputs, CONSUMERS * SLAB), gl.cdiv(num_tokens, TOKENS), num_steps)
    beside = (scales, factors, num_outputs)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_add, (0, ends, stages, sizes, beside, STEP, KIND, SCALED, DIVIDES, GROUP, ACTIVATION, BIASED,
                     ADDS)),
             (_add, (1, ends, stages, sizes, beside, STEP, KIND, SCALED, DIVIDES, GROUP, ACTIVATION, BIASED,
                     ADDS)),
             (_load, (x, weight, stages, sizes, STEP, GROUP))],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_add, (0, ends, stages, sizes, beside, STEP, KIND, SCALED, DIVIDES, GROUP, ACTIVATION, BIASED,
                     ADDS)),
             (_add, (1, ends, stages, sizes, beside, STEP, KIND, SCALED, DIVIDES, GROUP, ACTIVATION, BIASED,
                     ADDS)),
             (_add, (2, ends, stages, sizes, beside, STEP, KIND, SCALED, DIVIDES, GROUP, ACTIVATION, BIASED,
                     ADDS)),
             (_load, (x, weight, stages, sizes, STEP, GROUP))],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


@gluon.jit
def _load(x, weight, stages, sizes, STEP: gl.constexpr, GROUP: gl.constexpr):
    """The warp that loads: waits until every consumer has left a stage, then has it filled."""
    a, b, ready, empty = stages
    num_output_tiles, num_token_tiles, num_steps = sizes
    STAGES: gl.constexpr = b.shape[0]
    CONSUMERS: gl.constexpr = a.shape[0] // STAGES
    TOKENS: gl.constexpr = b.shape[1]
    UNIT: gl.constexpr = b.shape[2]
    stage, phase = 0, 1  # of a new barrier the phase before the first counts as ended
    num_tiles = num_output_tiles * num_token_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        for start in range(0, num_steps * STEP, UNIT):
            bar = ready.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, (CONSUMERS * SLAB + TOKENS) * UNIT * 2)
            for slab in gl.static_range(CONSUMERS):
                row = (output_tile * CONSUMERS + slab) * SLAB
                tma.async_copy_global_to_shared(weight, [row, start], bar, a.index(stage * CONSUMERS + slab))
            tma.async_copy_global_to_shared(x, [token_tile * TOKENS, start], bar, b.index(stage))
            stage, phase = _after(stage, phase, STAGES)


@gluon.jit
def _add(slab: gl.constexpr, ends, stages, sizes, beside, STEP: gl.constexpr, KIND: gl.constexpr,
         SCALED: gl.constexpr, DIVIDES: gl.constexpr, GROUP: gl.constexpr, ACTIVATION: gl.constexpr,
         BIASED: gl.constexpr, ADDS: gl.constexpr):  # fmt: skip
    """Four warps: a slab's products, step by step, and what ends them."""
    a, b, ready, empty = stages
    bias, residual, y, out, added = ends
    scales, factors, num_outputs = beside
    num_output_tiles, num_token_tiles, num_steps = sizes
    STAGES: gl.constexpr = b.shape[0]
    CONSUMERS: gl.constexpr = a.shape[0] // STAGES
    TOKENS: gl.constexpr = b.shape[1]
    UNITS: gl.constexpr = STEP // b.shape[2]
    PARTS: gl.constexpr = out.shape[0] // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    turn = 0
    stage, phase = 0, 0
    for tile in range(gl.program_id(0), num_output_tiles * num_token_tiles, gl.num_programs(0)):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        first_token, row = token_tile * TOKENS, (output_tile * CONSUMERS + slab) * SLAB
        column = row * y.block_shape[1] // SLAB
        if ADDS:
            _fetch(residual, out, slab * PARTS, PARTS, added.index(slab), first_token, column)
        output = gl.minimum(row + gl.arange(0, SLAB, rows), num_outputs - 1)
        scale_at = scales + (output // LANES).to(gl.int64) * (num_steps * LANES) + output % LANES
        total = gl.zeros((SLAB, TOKENS), gl.float32, layout)
        sums = gl.zeros((SLAB, TOKENS), gl.float32, layout)
        for step in range(num_steps):
            scale = gl.load(scale_at + step * LANES) if SCALED else 1.0
            oldest = stage
            for unit in gl.static_range(UNITS):
                mbarrier.wait(ready.index(stage), phase)
                right = b.index(stage).permute((1, 0))
                left = a.index(stage * CONSUMERS + slab)
                sums = warpgroup_mma(left, right, sums, use_acc=unit > 0, is_async=True)
                stage, phase = _after(stage, phase, STAGES)
            sums = warpgroup_mma_wait(0, (sums,))
            for _ in gl.static_range(UNITS):
                mbarrier.arrive(empty.index(oldest))
                oldest = gl.where(oldest + 1 == STAGES, 0, oldest + 1)
            total += sums * scale[:, None] if SCALED else sums
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
