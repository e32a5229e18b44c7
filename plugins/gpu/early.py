"""What a kernel may do before the one before it has ended; plugins/gpu/overlap.py says when it must wait.

It may have memory brought into the second-level cache: that reads nothing, so whoever still writes there is
not missed. A kernel that does nothing early need not say when it waits.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
PIECE = tl.constexpr(128)  # bytes that one instruction brings


@triton.jit
def wait(lines, EARLY: tl.constexpr):
    """Has EARLY bytes of the lines that start at these pointers brought, and waits for all kernels before."""
    if not INTERPRETED:
        if EARLY > 0:
            address = (
                lines.to(tl.int64, bitcast=True)[:, None] + tl.arange(0, EARLY // PIECE)[None, :] * PIECE
            )
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; // early $0",
                "=r,l",
                [address],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
