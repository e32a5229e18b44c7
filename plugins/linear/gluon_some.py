"""The dense layer over codes for dozens of tokens in Gluon for sm_90: widened where wgmma takes them.

Every output is the chain of plugins/gpu/codes.py and ends as triton.py's does, with the same bits. Words and
inputs come through rings in shared memory; a warp widens the words of sixteen outputs once for all tokens of
the tile, into the registers from which they are multiplied, and while it widens a part of a step the tensor
cores have the part before.
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

from hemiola.plugins.gpu.codes import instructions
from hemiola.plugins.linear.gluon import _after
from hemiola.plugins.linear.gluon_few import _leave, _store_best
from hemiola.plugins.linear.gluon_steps import _promoted, _times

SLAB = gl.constexpr(16)  # outputs whose words lie side by side: a warp's


@gluon.constexpr_function
def _placed(warps, half):
    """Of a step's lines of 128 bytes [slabs, lines, 64]: words where wgmma takes its left side's numbers."""
    each = 64 // half  # rows of a line
    row = {n: [0, n // each, 0] if n >= each else [0, 0, half * n] for n in (1, 2, 4, 8)}
    more = [[0, 0, 16 << bit] for bit in range((half // 16).bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], row[1], row[2], row[4]]
    slabs = [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    registers = [[0, 0, 1], row[8], [0, 0, 8], *more]
    return gl.DistributedLinearLayout(registers, lanes, slabs, [], [warps, half // 4, 64])


@gluon.jit(do_not_specialize=["num_tokens"])
def _coded_some(x, words, words_start, scales, zeros, factors, bias, residual, best, y, num_tokens,
                num_outputs, num_inputs, residual_len, y_len, KIND: gl.constexpr, HALF: gl.constexpr,
                PARTS: gl.constexpr, SCALED: gl.constexpr, ZEROS: gl.constexpr, DIVIDES: gl.constexpr,
                STAGES: gl.constexpr, EARLY: gl.constexpr, WARPS: gl.constexpr, ACTIVATION: gl.constexpr,
                BIASED: gl.constexpr, ADDS: gl.constexpr):  # fmt: skip
    # Grid: token tiles x output tiles, neighbours in the same codes; x and words are descriptors.
    # Tile: [WARPS * 16 outputs, tokens of x's box], the whole inner dimension.
    # Traffic: codes and scales once per token tile, x once per output tile (from L2), y once.
    TOKENS: gl.constexpr = x.block_shape[0]
    OUTPUTS: gl.constexpr = WARPS * SLAB
    LINES: gl.constexpr = HALF // 4
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    num_blocks, last_slab = gl.cdiv(num_inputs, PARTS * HALF), (num_outputs - 1) // SLAB
    a = gl.allocate_shared_memory(gl.int16, [STAGES, WARPS, LINES, 64], words.layout)
    b = gl.allocate_shared_memory(x.dtype, [STAGES * PARTS, TOKENS, HALF], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    first_slab, first_token = gl.program_id(1) * WARPS, gl.program_id(0) * TOKENS
    _wait(words_start, first_slab, last_slab, num_blocks * (LINES * 128), EARLY, WARPS)
    for stage in gl.static_range(STAGES):
        _bring(x, words, a, b, ready, stage, stage, first_slab, first_token)
    output = gl.minimum(first_slab * SLAB + gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout)), num_outputs - 1)
    row = gl.minimum(first_slab * SLAB + gl.arange(0, OUTPUTS, gl.SliceLayout(1, left)), num_outputs - 1)
    scale_at = (output // SLAB).to(gl.int64) * (num_blocks * SLAB) + output % SLAB
    beside_at = (row // SLAB).to(gl.int64) * (num_blocks * SLAB) + row % SLAB
    total = gl.zeros((OUTPUTS, TOKENS), gl.float32, layout)
    next_scale = gl.load(scales + scale_at) if SCALED else 0.0
    next_beside = gl.load(scales + beside_at) if KIND == "e2m1" else 0
    next_zero = gl.load(zeros + (beside_at if SCALED else row)) if ZEROS else 0
    stage, phase = 0, 0
    for block in range(num_blocks):
        scale, beside, zero = next_scale, next_beside, next_zero
        more = gl.minimum(block + 1, num_blocks - 1) * SLAB
        if SCALED:
            next_scale = gl.load(scales + scale_at + more)
        if KIND == "e2m1":
            next_beside = gl.load(scales + beside_at + more)
        if ZEROS and SCALED:
            next_zero = gl.load(zeros + beside_at + more)
        mbarrier.wait(ready.index(stage), phase)
        word = a.index(stage).load(_placed(WARPS, HALF)).reshape(OUTPUTS, HALF)
        word = gl.convert_layout(word, left, assert_trivial=True)
        sums = gl.zeros((OUTPUTS, TOKENS), gl.float32, layout)
        for part in gl.static_range(PARTS):
            number = _widened(word, zero, beside, part, KIND, ZEROS)
            inputs = b.index(stage * PARTS + part).permute((1, 0))
            sums = warpgroup_mma(number, inputs, sums, use_acc=part > 0, is_async=True)
        sums = warpgroup_mma_wait(0, (sums,))
        gl.thread_barrier()  # every warp has its words, and inputs are multiplied
        if block + STAGES < num_blocks:
            _bring(x, words, a, b, ready, stage, block + STAGES, first_slab, first_token)
        stage, phase = _after(stage, phase, STAGES)
        total = _promoted(total, sums, scale, 1.0, SCALED, "")
    if not SCALED:
        total = _times(total, gl.load(factors + output), KIND, DIVIDES)
    if BIASED:
        total += gl.load(bias + output).to(gl.float32)[:, None]
    if ACTIVATION == "argmax":
        _store_best(total, y, best, gl.program_id(1), num_tokens, num_outputs)
    else:
        _leave(total, residual, y, first_slab * SLAB, num_tokens, num_outputs, residual_len, y_len,
               ACTIVATION, ADDS)  # fmt: skip


@gluon.jit
def _wait(words_start, first_slab, last_slab, slab_bytes, EARLY: gl.constexpr, WARPS: gl.constexpr):
    """Has EARLY bytes of each slab's words brought into L2, and waits for all kernels before (early.py)."""
    thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    slab = gl.minimum(first_slab + thread // 32, last_slab)
    start = words_start.to(gl.int64, bitcast=True) + slab.to(gl.int64) * slab_bytes + thread % 32 * 128
    for part in gl.static_range(EARLY // 4096):
        gl.inline_asm_elementwise("prefetch.global.L2 [$1]; // early $0", "=r,l", [start + part * 4096],
                                  dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip
    gl.inline_asm_elementwise("griddepcontrol.wait; griddepcontrol.launch_dependents; // $0 $1", "=r,r",
                              [thread], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _bring(x, words, a, b, ready, stage, block, first_slab, first_token):
    """Has the words and inputs of a step brought to a stage."""
    LINES: gl.constexpr = a.shape[2]
    PARTS: gl.constexpr = b.shape[0] // a.shape[0]
    HALF: gl.constexpr = b.shape[2]
    bar = ready.index(stage)
    mbarrier.expect(bar, a.shape[1] * LINES * 128 + PARTS * b.shape[1] * HALF * 2)
    tma.async_copy_global_to_shared(words, [first_slab, block * LINES, 0], bar, a.index(stage))
    for part in gl.static_range(PARTS):
        start = (block * PARTS + part) * HALF
        tma.async_copy_global_to_shared(x, [first_token, start], bar, b.index(stage * PARTS + part))


@gluon.jit
def _widened(word, zero, scale, part: gl.constexpr, KIND: gl.constexpr, ZEROS: gl.constexpr):
    """A part of words as the tensor cores take it; see codes.py, widened."""
    if KIND == "int4" and ZEROS:
        number = _pairs(word, instructions("int4 and 136", part))
        return number - (zero.to(gl.float32) + 136.0).to(gl.bfloat16)[:, None]
    elif ZEROS:
        return _pairs(word, instructions(KIND, part)) - zero.to(gl.float32).to(gl.bfloat16)[:, None]
    elif KIND == "e2m1":
        code = (scale >> (8 * part)) & 255
        raised = ((code + (127 - 16 + 110) * 8) << 4).to(gl.int16).to(gl.bfloat16, bitcast=True)
        return _pairs(word, instructions(KIND, part)) * raised[:, None]
    else:
        return _pairs(word, instructions(KIND, part))


@gluon.jit
def _pairs(word, TEXT: gl.constexpr):
    """bf16 numbers of words, by these instructions: two of each in a register."""
    return gl.inline_asm_elementwise(TEXT, "=r,r", [word], dtype=gl.bfloat16, is_pure=True, pack=2)
