"""delta's sizes on CUDA, for tests/plugins/test_recurrences_triton.py."""

import torch
import torch.nn.functional as F
from kit.gpu_steps import DEVICE, Subject, halves


def subject(
    heads: int = 4,
    width: int = 128,
    groups: int = 2,
    depth: int = 128,
    chunk_len: int = 16,
    drafts: int = 4,
    channel: bool = False,
    strong: float = 1.0,
    alike: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
) -> Subject:
    """`strong` decays, `channel`: one per channel; `alike` > 0: keys that resemble each other."""
    decays = depth if channel else 1
    fixed = torch.Generator().manual_seed(1)
    dt_bias = torch.randn(heads, decays, generator=fixed).to(DEVICE) - 2
    A = (-torch.rand(heads, generator=fixed) * strong - 0.01).to(DEVICE)
    common = torch.randn(depth, generator=fixed).to(DEVICE)

    def make_tokens(num: int) -> list[torch.Tensor]:
        q, k = (torch.randn(num, groups, depth, device=DEVICE) + alike * common for _ in range(2))
        q, k = F.normalize(q, dim=-1) * depth**-0.5, F.normalize(k, dim=-1)
        v = halves(num, heads * width, dtype).unflatten(1, (heads, width))
        a, b = torch.randn(num, heads, decays, device=DEVICE), torch.randn(num, heads, device=DEVICE) * 2
        return [q.to(dtype), k.to(dtype), v, a, b]

    sizes = {"H": heads, "V": width, "G": groups, "K": depth, "J": decays}
    return Subject("delta", sizes, chunk_len, make_tokens, [dt_bias, A], num_drafts=drafts, dtype=dtype)


SHAPES = {
    "base": {},
    "chunk 32": {"chunk_len": 32},
    "channel": {"channel": True},
    "channel, chunk 32": {"channel": True, "chunk_len": 32},
    "channel, strong decay": {"channel": True, "strong": 100.0},
    "width 80": {"width": 80},
    "small": {"width": 16, "depth": 16},
    "depth 64": {"depth": 64},
    "one head": {"heads": 1, "groups": 1},
    "64 drafts": {"drafts": 64},
    "strong decay": {"strong": 100.0},
    "alike keys": {"alike": 2.0},
}
FP32 = {
    "fp32": {"dtype": torch.float32},
    "fp32, chunk 32": {"dtype": torch.float32, "chunk_len": 32, "depth": 64},
    "fp32, channel": {"dtype": torch.float32, "channel": True, "depth": 32, "width": 48},
}
TILES = [
    (16, 1, 1, 1, 16, 1, 2, 3, 1, 0, 40, False),
    (32, 4, 3, 2, 64, 4, 1, 500, 2, 168, 1, True),
    (64, 2, 2, 4, 32, 2, 3, 1, 4, 0, 7, False),
    (128, 2, 2, 4, 64, 4, 2, 7, 2, 128, 500, True),
    (32, 1, 1, 4, 16, 1, 1, 3, 1, 0, 40, False, True),
    (64, 2, 1, 4, 16, 1, 1, 3, 1, 0, 40, False, True),
    (16, 4, 1, 2, 16, 1, 1, 3, 1, 0, 40, False, True),
]
# A row that passes an edge first, and one launch, at further sizes.
OTHERS = [{"chunk_len": 32}, {"channel": True}, {"width": 80}, {"drafts": 20}]
PLANS = [*(({}, tiles) for tiles in TILES), *((sizes, TILES[n]) for sizes in OTHERS for n in (1, 4))]
STATE_ERROR = 2e-4
LARGE = {"heads": 32, "groups": 16}, 32 * 128 * 128  # numbers of a state
LATE: dict[str, int] = {}
