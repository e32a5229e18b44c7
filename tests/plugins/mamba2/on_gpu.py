"""mamba2's sizes on CUDA, for tests/plugins/test_recurrences_triton.py."""

import torch
from kit.gpu_steps import DEVICE, Subject, halves

DT = (0.001, 4.0)


def subject(
    heads: int = 4,
    width: int = 64,
    groups: int = 2,
    depth: int = 128,
    chunk_len: int = 32,
    drafts: int = 4,
    strong: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
) -> Subject:
    fixed = torch.Generator().manual_seed(1)
    dt_bias, D = (torch.randn(heads, generator=fixed).to(DEVICE) - 2 for _ in range(2))
    A = (-torch.rand(heads, generator=fixed) * 4 * strong - 0.1).to(DEVICE)

    def make_tokens(num: int) -> list[torch.Tensor]:
        wide = halves(num, heads * width + 2 * groups * depth, dtype)
        x, B, C = wide.split([heads * width, groups * depth, groups * depth], 1)
        B, C = (part.unflatten(1, (groups, depth)) / depth**0.25 for part in (B, C))
        return [x.unflatten(1, (heads, width)), B, C, torch.randn(num, heads, device=DEVICE)]

    sizes = {"H": heads, "P": width, "G": groups, "D": depth}
    return Subject("mamba2", sizes, chunk_len, make_tokens, [dt_bias, A, D], DT, drafts, dtype=dtype)


SHAPES = {
    "base": {},
    "chunk 16": {"chunk_len": 16},
    "width 80": {"width": 80},
    "depth 16": {"depth": 16, "width": 16},
    "depth 256": {"depth": 256},
    "one group": {"groups": 1},
    "no drafts": {"drafts": 0},
    "64 drafts": {"drafts": 64},
    "strong decay": {"strong": 30.0},
}
FP32 = {
    "fp32": {"dtype": torch.float32},
    "fp32, chunk 16": {"dtype": torch.float32, "chunk_len": 16, "width": 80},
}
TILES = [
    (16, 1, 3, 2, 1, 16, 1, 1, 3),
    (32, 2, 2, 1, 2, 64, 3, 2, 500),
    (64, 1, 1, 3, 4, 32, 2, 4, 1),
    (64, 2, 3, 2, 4, 64, 2, 4, 264),
]
PLANS = [({}, tiles) for tiles in TILES]
STATE_ERROR = 1e-4
LARGE = {"heads": 64, "groups": 8}, 64 * 64 * 128  # numbers of a state
LATE = {"chunk_len": 16}
