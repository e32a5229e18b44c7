"""The dense layer in Gluon for sm_90: a warp loads, one to three consumers of four warps multiply.

Every output is the chain of sums of plugins/gpu/dense.py and ends as triton.py's does, with the same bits.
Triton has no tile of three times 64 outputs, and its warps load and multiply in turns.
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

from hemiola.plugins.gpu.activations import relu2, silu
from hemiola.plugins.gpu.dense import place_of

SLAB = gl.constexpr(64)  # outputs of a consumer: the rows of its instruction
WIDTH = gl.constexpr(128)  # most tokens of an instruction; for 256 a kernel must start with more registers
PART = gl.constexpr(64)  # tokens that are stored at once


@gluon.jit(do_not_specialize=["num_tokens", "num_outputs", "num_inputs"])
def _dense(x, weight, bias, residual, y, num_tokens, num_outputs, num_inputs, CONSUMERS: gl.constexpr,
           STAGES: gl.constexpr, GROUP: gl.constexpr, REGISTERS: gl.constexpr, ACTIVATION: gl.constexpr,
           BIASED: gl.constexpr, ADDS: gl.constexpr):  # fmt: skip
    # Grid: one program per multiprocessor, which walks over tiles; x, weight, residual and y are descriptors.
    # Tile: [CONSUMERS * 64 outputs, tokens of x's box], the whole inner dimension.
    # Traffic: weights once per token tile and x once per output tile, mostly from L2; y once.
    # It begins by waiting for the kernels before it (plugins/gpu/overlap.py): nothing is fetched early.
    TOKENS: gl.constexpr = x.block_shape[0]
    INNER: gl.constexpr = x.block_shape[1]
    PARTS: gl.constexpr = TOKENS // PART if ADDS else 1
    a = gl.allocate_shared_memory(weight.dtype, [STAGES * CONSUMERS, SLAB, INNER], weight.layout)
    b = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, INNER], x.layout)
    out = gl.allocate_shared_memory(y.dtype, [CONSUMERS * PARTS, PART, y.block_shape[1]], y.layout)
    ready, empty, added = _barriers(STAGES, CONSUMERS)
    stages, ends = (a, b, ready, empty), (bias, residual, y, out, added)
    sizes = (gl.cdiv(num_outputs, CONSUMERS * SLAB), gl.cdiv(num_tokens, TOKENS), num_inputs)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_consume, (0, ends, stages, sizes, num_outputs, GROUP, ACTIVATION, BIASED, ADDS)),
             (_load, (x, weight, stages, sizes, GROUP))],
            [1], [24],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, (0, ends, stages, sizes, num_outputs, GROUP, ACTIVATION, BIASED, ADDS)),
             (_consume, (1, ends, stages, sizes, num_outputs, GROUP, ACTIVATION, BIASED, ADDS)),
             (_load, (x, weight, stages, sizes, GROUP))],
            [4, 1], [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consume, (0, ends, stages, sizes, num_outputs, GROUP, ACTIVATION, BIASED, ADDS)),
             (_consume, (1, ends, stages, sizes, num_outputs, GROUP, ACTIVATION, BIASED, ADDS)),
             (_consume, (2, ends, stages, sizes, num_outputs, GROUP, ACTIVATION, BIASED, ADDS)),
             (_load, (x, weight, stages, sizes, GROUP))],
            [4, 4, 1], [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


@gluon.jit
def _barriers(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Of stages: filled, and left by every consumer; of consumers: their residual is there."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    for slab in gl.static_range(CONSUMERS):
        mbarrier.init(added.index(slab), count=1)
    fence_async_shared()
    return ready, empty, added


@gluon.jit
def _after(stage, phase, STAGES: gl.constexpr):
    """The next stage, and which phase of its barriers is meant."""
    is_last = stage + 1 == STAGES
    return gl.where(is_last, 0, stage + 1), gl.where(is_last, phase ^ 1, phase)


@gluon.jit
def _load(x, weight, stages, sizes, GROUP: gl.constexpr):
    """The warp that loads: waits until every consumer has left a stage, then has it filled."""
    a, b, ready, empty = stages
    num_output_tiles, num_token_tiles, num_inputs = sizes
    STAGES: gl.constexpr = b.shape[0]
    CONSUMERS: gl.constexpr = a.shape[0] // STAGES
    TOKENS: gl.constexpr = b.shape[1]
    INNER: gl.constexpr = b.shape[2]
    stage, phase = 0, 1  # of a new barrier the phase before the first counts as ended
    for tile in range(gl.program_id(0), num_output_tiles * num_token_tiles, gl.num_programs(0)):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        for start in range(0, num_inputs, INNER):
            bar = ready.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, (CONSUMERS * SLAB + TOKENS) * INNER * 2)
            for slab in gl.static_range(CONSUMERS):
                row = (output_tile * CONSUMERS + slab) * SLAB
                tma.async_copy_global_to_shared(weight, [row, start], bar, a.index(stage * CONSUMERS + slab))
            tma.async_copy_global_to_shared(x, [token_tile * TOKENS, start], bar, b.index(stage))
            stage, phase = _after(stage, phase, STAGES)


@gluon.jit
def _consume(slab: gl.constexpr, ends, stages, sizes, num_outputs, GROUP: gl.constexpr,
             ACTIVATION: gl.constexpr, BIASED: gl.constexpr, ADDS: gl.constexpr):  # fmt: skip
    """Four warps: a slab's products, one under way while the next is waited for, and what ends them."""
    a, b, ready, empty = stages
    bias, residual, y, out, added = ends
    num_output_tiles, num_token_tiles, num_inputs = sizes
    STAGES: gl.constexpr = b.shape[0]
    CONSUMERS: gl.constexpr = a.shape[0] // STAGES
    TOKENS: gl.constexpr = b.shape[1]
    INNER: gl.constexpr = b.shape[2]
    PARTS: gl.constexpr = out.shape[0] // CONSUMERS
    width: gl.constexpr = TOKENS if TOKENS < WIDTH else WIDTH
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    stage, phase, before, turn = 0, 0, 0, 0
    for tile in range(gl.program_id(0), num_output_tiles * num_token_tiles, gl.num_programs(0)):
        output_tile, token_tile = place_of(tile, num_output_tiles, num_token_tiles, GROUP)
        first_token, row = token_tile * TOKENS, (output_tile * CONSUMERS + slab) * SLAB
        column = row * y.block_shape[1] // SLAB
        if ADDS:
            _fetch(residual, out, slab * PARTS, PARTS, added.index(slab), first_token, column)
        total = gl.zeros((SLAB, TOKENS), gl.float32, layout)
        for start in range(0, num_inputs, INNER):
            mbarrier.wait(ready.index(stage), phase)
            left, right = a.index(stage * CONSUMERS + slab), b.index(stage).permute((1, 0))
            total = warpgroup_mma(left, right, total, is_async=True)
            total = warpgroup_mma_wait(1, (total,))
            mbarrier.arrive(empty.index(before), pred=start > 0)  # the product before has read its stage
            before = stage
            stage, phase = _after(stage, phase, STAGES)
        total = warpgroup_mma_wait(0, (total,))
        mbarrier.arrive(empty.index(before))
        total = _end(total, bias, row, num_outputs, ACTIVATION, BIASED)
        if ADDS:
            mbarrier.wait(added.index(slab), turn)
            turn ^= 1
        _store(total, y, out, slab * PARTS, first_token, column, ADDS)
    tma.store_wait(0)


@gluon.jit
def _fetch(residual, out, first: gl.constexpr, PARTS: gl.constexpr, bar, first_token, column):
    """Has a slab's residual brought to where its outputs will lie, while its products are made."""
    tma.store_wait(0)  # of the tile before: out has been read
    mbarrier.expect(bar, PARTS * out.shape[1] * out.shape[2] * 2)
    for at in gl.static_range(PARTS):
        place = out.index(first + at)
        tma.async_copy_global_to_shared(residual, [first_token + at * PART, column], bar, place)


@gluon.jit
def _end(total, bias, row, num_outputs, ACTIVATION: gl.constexpr, BIASED: gl.constexpr):
    """A slab [outputs, tokens] after bias and activation."""
    if BIASED:
        output = row + gl.arange(0, SLAB, gl.SliceLayout(1, total.type.layout))
        total += gl.load(bias + gl.minimum(output, num_outputs - 1)).to(gl.float32)[:, None]
    if ACTIVATION == "relu2":
        return relu2(total)
    elif ACTIVATION == "swiglu":
        return _open_eights(total)
    else:
        return total


@gluon.jit
def _open_eights(total):
    """[outputs, tokens] -> half as many: a thread holds rows r and r + 8, a gate and what it opens."""
    eights = total.reshape(total.shape[0] // 16, 2, 8, total.shape[1])
    gate, value = eights.permute(0, 2, 3, 1).split()
    return (silu(gate) * value).reshape(total.shape[0] // 2, total.shape[1])


@gluon.constexpr_function
def _halvings(num_tokens):
    return max(num_tokens.bit_length() - 7, 0)


@gluon.jit
def _parts(total):
    """A slab's tokens, PART at a time; they lie in different registers."""
    parts = (total,)
    for _ in gl.static_range(_halvings(total.shape[1])):
        halves = ()
        for at in gl.static_range(len(parts)):
            whole = parts[at]
            halves += whole.reshape(whole.shape[0], 2, whole.shape[1] // 2).permute(0, 2, 1).split()
        parts = halves
    return parts


@gluon.jit
def _store(total, y, out, first: gl.constexpr, first_token, column, ADDS: gl.constexpr):
    """Stores a slab, part by part; ADDS: onto what lies in out."""
    parts = _parts(total)
    for at in gl.static_range(len(parts)):
        part = parts[at]
        if ADDS:
            place = out.index(first + at)
            part += place.permute((1, 0)).load(part.type.layout).to(gl.float32)
        else:
            place = out.index(first)
            tma.store_wait(0)  # of the part before: it has been read
        place.permute((1, 0)).store(part.to(y.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [first_token + at * PART, column], place)
