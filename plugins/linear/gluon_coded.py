"""The dense layer over codes in Gluon for sm_90: a warp loads, four others widen and multiply.

Every output is the chain of steps of plugins/gpu/codes.py and ends as triton.py's does, with the same bits.
They widen a step's codes in registers while the tensor cores have those of the step before. (For two such
groups in a program ptxas finds too few registers and makes products wait, C7512; two programs have enough.)
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
from hemiola.plugins.linear.gluon_steps import _promoted, _times

LANES = gl.constexpr(16)  # outputs whose words lie side by side
SLAB = gl.constexpr(64)  # outputs of a tile: the rows of the instruction


@gluon.constexpr_function
def _parts(kind):
    """Codes of a word."""
    return 2 if kind in ("e4m3", "int8") else 4


@gluon.constexpr_function
def _words_of(half):
    """A tile's words [4, 16, half] as the left operand of a product lies."""
    inner = [[0, 0, 1 << bit] for bit in range(4, half.bit_length() - 1)]
    registers = [[0, 0, 1], [0, 8, 0], [0, 0, 8], *inner]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0], [2, 0, 0]], [], [4, 16, half])


@gluon.jit(do_not_specialize=["num_tokens", "num_outputs", "num_blocks"])
def _dense_coded(x, words, scales, zeros, factors, bias, residual, y, num_tokens, num_outputs, num_blocks,
                 KIND: gl.constexpr, SCALED: gl.constexpr, ZEROS: gl.constexpr, DIVIDES: gl.constexpr,
                 STAGES: gl.constexpr, GROUP: gl.constexpr, ACTIVATION: gl.constexpr, BIASED: gl.constexpr,
                 ADDS: gl.constexpr):  # fmt: skip
    # Grid: two programs per multiprocessor, which walk over tiles; x, words, residual and y are descriptors.
    # Tile: [64 outputs, tokens of x's box], the whole inner dimension.
    # Traffic: codes once per token tile and x once per output tile, mostly from L2; y once.
    # It begins by waiting for the kernels before it (plugins/gpu/overlap.py): nothing is fetched early.
    TOKENS: gl.constexpr = x.block_shape[0]
    HALF: gl.constexpr = x.block_shape[1]
    a = gl.allocate_shared_memory(words.dtype, [STAGES, SLAB // LANES, LANES, HALF], words.layout)
    b = gl.allocate_shared_memory(x.dtype, [STAGES * _parts(KIND), TOKENS, HALF], x.layout)
    out = gl.allocate_shared_memory(y.dtype, [1, TOKENS, y.block_shape[1]], y.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(added.index(0), count=1)
    fence_async_shared()
    stages, ends = (a, b, ready, empty), (bias, residual, y, out, added)
    sizes = (gl.cdiv(num_outputs, SLAB), gl.cdiv(num_tokens, TOKENS), num_blocks)
    beside = (scales, zeros, factors, num_outputs)
    gl.warp_specialize(
        [(_multiply, (ends, stages, sizes, beside, KIND, SCALED, ZEROS, DIVIDES, GROUP, ACTIVATION, BIASED,
                      ADDS)),
         (_load, (x, words, stages, sizes, KIND, GROUP))],
        [1], [24],
    )  # fmt: skip


@gluon.jit
def _load(x, words, stages, sizes, KIND: gl.constexpr, GROUP: gl.constexpr):
    """The warp that loads: waits until a stage is left, then has it filled with a step."""
    a, b, ready, empty = stages
    num_output_tiles, num_token_tiles, num_blocks = sizes
    STAGES: gl.constexpr = ready.shape[0]
    TOKENS: gl.constexpr = b.shape[1]
    HALF: gl.constexpr = b.shape[2]
    EACH: gl.constexpr = _parts(KIND)
    stage, phase = 0, 1  # of a new barrier the phase before the first counts as ended
    for tile in range(gl.program_id(0), num_output_tiles * num_token_tiles, gl.num_programs(0)):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        for block in range(num_blocks):
            bar = ready.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, (SLAB + EACH * TOKENS) * HALF * 2)
            place = [output_tile * (SLAB // LANES), block * LANES, 0]
            tma.async_copy_global_to_shared(words, place, bar, a.index(stage))
            for part in gl.static_range(EACH):
                place = [token_tile * TOKENS, (block * EACH + part) * HALF]
                tma.async_copy_global_to_shared(x, place, bar, b.index(stage * EACH + part))
            stage, phase = _after(stage, phase, STAGES)


@gluon.jit
def _multiply(ends, stages, sizes, beside, KIND: gl.constexpr, SCALED: gl.constexpr, ZEROS: gl.constexpr,
              DIVIDES: gl.constexpr, GROUP: gl.constexpr, ACTIVATION: gl.constexpr, BIASED: gl.constexpr,
              ADDS: gl.constexpr):  # fmt: skip
    """Four warps: a tile's numbers and their products, step by step, and what ends them."""
    a, b, ready, empty = stages
    bias, residual, y, out, added = ends
    scales, zeros, factors, num_outputs = beside
    num_output_tiles, num_token_tiles, num_blocks = sizes
    STAGES: gl.constexpr = ready.shape[0]
    TOKENS: gl.constexpr = b.shape[1]
    HALF: gl.constexpr = b.shape[2]
    EACH: gl.constexpr = _parts(KIND)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    lying: gl.constexpr = _words_of(HALF)
    turn = 0
    stage, phase, before = 0, 0, 0
    for tile in range(gl.program_id(0), num_output_tiles * num_token_tiles, gl.num_programs(0)):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        first_token, row = token_tile * TOKENS, output_tile * SLAB
        column = row * y.block_shape[1] // SLAB
        if ADDS:
            _fetch(residual, out, 0, 1, added.index(0), first_token, column)
        output = gl.minimum(row + gl.arange(0, SLAB, gl.SliceLayout(1, layout)), num_outputs - 1)
        beside_at = (output // LANES).to(gl.int64) * (num_blocks * LANES) + output % LANES
        total = gl.zeros((SLAB, TOKENS), gl.float32, layout)
        sums = gl.zeros((SLAB, TOKENS), gl.float32, layout)
        scale = gl.zeros((SLAB,), gl.float32, gl.SliceLayout(1, layout))
        row_zero = gl.load(zeros + output) if ZEROS and not SCALED else 0
        next_scale = gl.load(scales + beside_at) if SCALED or KIND == "e2m1" else 0
        for step in range(num_blocks):
            here = next_scale
            if SCALED or KIND == "e2m1":  # a step early: nothing waits for it
                next_scale = gl.load(scales + beside_at + gl.minimum(step + 1, num_blocks - 1) * LANES)
            zero = gl.load(zeros + beside_at + step * LANES) if ZEROS and SCALED else row_zero
            mbarrier.wait(ready.index(stage), phase)
            word = a.index(stage).load(lying).reshape(SLAB, HALF)
            word = gl.convert_layout(word, left)
            numbers = ()
            for part in gl.static_range(EACH):
                numbers += (_numbers(word, zero, here, part, KIND, ZEROS),)
            sums = warpgroup_mma_wait(0, (sums,))
            mbarrier.arrive(empty.index(before), pred=step > 0)
            total = _promoted(total, sums, scale, 1.0, SCALED, "")
            for part in gl.static_range(EACH):
                right = b.index(stage * EACH + part).permute((1, 0))
                sums = warpgroup_mma(numbers[part], right, sums, use_acc=part > 0, is_async=True)
            sums = warpgroup_mma_wait(EACH, (sums,))  # they are under way
            if SCALED:
                scale = here
            before = stage
            stage, phase = _after(stage, phase, STAGES)
        sums = warpgroup_mma_wait(0, (sums,))
        mbarrier.arrive(empty.index(before))
        total = _promoted(total, sums, scale, 1.0, SCALED, "")
        if not SCALED:
            total = _times(total, gl.load(factors + output), KIND, DIVIDES)
        total = _end(total, bias, row, num_outputs, ACTIVATION, BIASED)
        if ADDS:
            mbarrier.wait(added.index(0), turn)
            turn ^= 1
        _store(total, y, out, 0, first_token, column, ADDS)
    tma.store_wait(0)


@gluon.jit
def _numbers(word, zero, scale, part: gl.constexpr, KIND: gl.constexpr, ZEROS: gl.constexpr):
    """A part of words, bf16."""
    rows: gl.constexpr = gl.SliceLayout(1, word.type.layout)
    if ZEROS:
        zero = gl.convert_layout(zero, rows)
    if KIND == "e2m1":
        scale = gl.convert_layout(scale, rows)
    return widened(word, zero, scale, 1.0, part, KIND, ZEROS, False, gl.bfloat16)
