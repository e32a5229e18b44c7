"""The dense layer with inputs and weights in e4m3, in Gluon for sm_90: a warp loads, consumers of four warps
multiply and add up.

Every output is the chain of steps of plugins/gpu/e4m3.py and ends as triton.py's does, with the same bits.
Scales come to shared memory with the codes of their steps: one that came from memory where it is needed would
make each step wait for it. A consumer adds up a step while the tensor cores have the steps behind it.
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

SLAB = gl.constexpr(64)  # outputs of a consumer: the rows of its instruction
LEAST = gl.constexpr(32)  # scales of a place in shared memory: it begins at 128 bytes


@gluon.jit(do_not_specialize=["num_tokens", "num_outputs", "num_steps"])
def _dense_e4m3(x, by, weight, scales, bias, residual, y, num_tokens, num_outputs, num_steps,
                BY: gl.constexpr, SPAN: gl.constexpr, ABREAST: gl.constexpr, CONSUMERS: gl.constexpr,
                STAGES: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr,
                ACTIVATION: gl.constexpr, BIASED: gl.constexpr, ADDS: gl.constexpr):  # fmt: skip
    # Grid: one program per multiprocessor, which walks over tiles; x, by, weight, scales, residual and y are
    # descriptors.
    # Tile: [CONSUMERS * 64 outputs, tokens of x's box], the whole inner dimension, ABREAST steps a stage.
    # Traffic: weights once per token tile and x once per output tile, mostly from L2; y once.
    # BY: "step" where each step has a scale of the inputs, or "token"; SPAN: steps that share a scale of an
    # output, or 0: all. num_steps is a multiple of ABREAST, and so is SPAN, if it is above 1.
    TOKENS: gl.constexpr = x.block_shape[0]
    STEP: gl.constexpr = x.block_shape[1]
    PARTS: gl.constexpr = TOKENS // y.block_shape[0] if ADDS else 1
    a = gl.allocate_shared_memory(weight.dtype, [STAGES * CONSUMERS * ABREAST, SLAB, STEP], weight.layout)
    b = gl.allocate_shared_memory(x.dtype, [STAGES * ABREAST, TOKENS, STEP], x.layout)
    # A stage is left before its scales are read, so these have a place more.
    a_by = gl.allocate_shared_memory(gl.float32, [(STAGES + 1) * CONSUMERS, ABREAST, SLAB], scales.layout)
    b_by = gl.allocate_shared_memory(gl.float32, [STAGES + 1, ABREAST, max(TOKENS, LEAST)], by.layout)
    lines: gl.constexpr = [CONSUMERS * PARTS, y.block_shape[0], y.block_shape[1]]
    out = gl.allocate_shared_memory(y.dtype, lines, y.layout)
    ready, empty, added = _barriers(STAGES, CONSUMERS)
    stages, ends = (a, b, a_by, b_by, ready, empty), (bias, residual, y, out, added)
    sizes = (gl.cdiv(num_outputs, CONSUMERS * SLAB), gl.cdiv(num_tokens, TOKENS), num_steps)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_add, (0, ends, stages, sizes, num_outputs, BY, SPAN, GROUP, ACTIVATION, BIASED, ADDS)),
             (_load, (x, by, weight, scales, stages, sizes, BY, SPAN, GROUP))],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_add, (0, ends, stages, sizes, num_outputs, BY, SPAN, GROUP, ACTIVATION, BIASED, ADDS)),
             (_add, (1, ends, stages, sizes, num_outputs, BY, SPAN, GROUP, ACTIVATION, BIASED, ADDS)),
             (_load, (x, by, weight, scales, stages, sizes, BY, SPAN, GROUP))],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip


@gluon.jit
def _load(x, by, weight, scales, stages, sizes, BY: gl.constexpr, SPAN: gl.constexpr, GROUP: gl.constexpr):
    """The warp that loads: waits until every consumer has left a stage, then has it filled."""
    a, b, a_by, b_by, ready, empty = stages
    num_output_tiles, num_token_tiles, num_steps = sizes
    STAGES: gl.constexpr = ready.shape[0]
    ABREAST: gl.constexpr = b_by.shape[1]
    CONSUMERS: gl.constexpr = a_by.shape[0] // (STAGES + 1)
    TOKENS: gl.constexpr = b.shape[1]
    STEP: gl.constexpr = b.shape[2]
    stage, phase, slot = 0, 1, 0  # of a new barrier the phase before the first counts as ended
    num_tiles = num_output_tiles * num_token_tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        row, first_token = output_tile * CONSUMERS * SLAB, token_tile * TOKENS
        for step in range(0, num_steps, ABREAST):
            bar = ready.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, (CONSUMERS * SLAB + TOKENS) * (STEP + 4) * ABREAST)
            for at in gl.static_range(ABREAST):
                start, place = (step + at) * STEP, stage * ABREAST + at
                for slab in gl.static_range(CONSUMERS):
                    left = a.index(place * CONSUMERS + slab)
                    tma.async_copy_global_to_shared(weight, [row + slab * SLAB, start], bar, left)
                tma.async_copy_global_to_shared(x, [first_token, start], bar, b.index(place))
            span = step // SPAN if SPAN > 0 else 0
            for slab in gl.static_range(CONSUMERS):
                box = a_by.index(slot * CONSUMERS + slab)
                tma.async_copy_global_to_shared(scales, [span, row + slab * SLAB], bar, box)
            group = step if BY == "step" else 0
            box = b_by.index(slot)._reinterpret(gl.float32, [ABREAST, TOKENS], by.layout)
            tma.async_copy_global_to_shared(by, [group, first_token], bar, box)
            stage, phase = _after(stage, phase, STAGES)
            slot = gl.where(slot == STAGES, 0, slot + 1)


@gluon.jit
def _add(slab: gl.constexpr, ends, stages, sizes, num_outputs, BY: gl.constexpr, SPAN: gl.constexpr,
         GROUP: gl.constexpr, ACTIVATION: gl.constexpr, BIASED: gl.constexpr,
         ADDS: gl.constexpr):  # fmt: skip
    """Four warps: a slab's products, step by step, and what ends them."""
    a, b, a_by, b_by, ready, empty = stages
    bias, residual, y, out, added = ends
    num_output_tiles, num_token_tiles, num_steps = sizes
    STAGES: gl.constexpr = ready.shape[0]
    ABREAST: gl.constexpr = b_by.shape[1]
    CONSUMERS: gl.constexpr = a_by.shape[0] // (STAGES + 1)
    TOKENS: gl.constexpr = b.shape[1]
    PARTS: gl.constexpr = out.shape[0] // CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 32])
    stage, phase, slot, turn = 0, 0, 0, 0
    sums = ()
    for _at in gl.static_range(ABREAST):
        sums += (gl.zeros((SLAB, TOKENS), gl.float32, layout),)
    for tile in range(gl.program_id(0), num_output_tiles * num_token_tiles, gl.num_programs(0)):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        first_token, row = token_tile * TOKENS, (output_tile * CONSUMERS + slab) * SLAB
        column = row * y.block_shape[1] // SLAB
        if ADDS:
            _fetch(residual, out, slab * PARTS, PARTS, added.index(slab), first_token, column)
        total = gl.zeros((SLAB, TOKENS), gl.float32, layout)
        for _ in range(num_steps // ABREAST):
            mbarrier.wait(ready.index(stage), phase)
            started = ()
            for at in gl.static_range(ABREAST):
                left = a.index((stage * ABREAST + at) * CONSUMERS + slab)
                right = b.index(stage * ABREAST + at).permute((1, 0))
                started += (warpgroup_mma(left, right, sums[at], use_acc=False, is_async=True),)
            sums = ()
            for at in gl.static_range(ABREAST):
                sums += (warpgroup_mma_wait(ABREAST - 1 - at, (started[at],)),)
                if at == ABREAST - 1:
                    mbarrier.arrive(empty.index(stage))
                scale = _line(a_by.index(slot * CONSUMERS + slab), at if SPAN == 1 else 0, SLAB)
                each = _line(b_by.index(slot), at if BY == "step" else 0, TOKENS).load(layout)
                scale = scale.permute((1, 0)).load(layout)
                total = gl.fma(sums[at] * each, scale.broadcast_to(total.shape), total)
            stage, phase = _after(stage, phase, STAGES)
            slot = gl.where(slot == STAGES, 0, slot + 1)
        total = _end(total, bias, row, num_outputs, ACTIVATION, BIASED)
        if ADDS:
            mbarrier.wait(added.index(slab), turn)
            turn ^= 1
        _store(total, y, out, slab * PARTS, first_token, column, ADDS)
    tma.store_wait(0)


@gluon.jit
def _line(box, at: gl.constexpr, NUM: gl.constexpr):
    """A line of a box of scales, which lie as in memory: [1, NUM]."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return box._reinterpret(gl.float32, [box.shape[0], NUM], plain).slice(at, 1, 0)
