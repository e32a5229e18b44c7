"""delta on CUDA: the bits of the plain run however steps are cut, and the truth in fp64."""

import pytest
import torch
import torch.nn.functional as F
from kit.gpu_steps import Subject, error, plain_run, rows_of, same_bits, storm

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
DEVICE = "cuda" if CUDA else "cpu"


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
    plan: tuple[int, ...] | None = None,
) -> Subject:
    """`strong` decays, `channel`: one per channel; `alike` > 0: keys that resemble each other."""
    from hemiola.plugins.delta.cuda import TilePlan, delta

    decays = depth if channel else 1
    fixed = torch.Generator().manual_seed(1)
    dt_bias = torch.randn(heads, decays, generator=fixed).to(DEVICE) - 2
    A = (-torch.rand(heads, generator=fixed) * strong - 0.01).to(DEVICE)
    common = torch.randn(depth, generator=fixed).to(DEVICE)
    ring_len = chunk_len + drafts

    def make_tokens(num: int) -> list[torch.Tensor]:
        q, k = (torch.randn(num, groups, depth, device=DEVICE) + alike * common for _ in range(2))
        wide = torch.randn(num, heads * width + 64, device=DEVICE).bfloat16()
        q, k = F.normalize(q, dim=-1) * depth**-0.5, F.normalize(k, dim=-1)
        return [
            q.bfloat16(),
            k.bfloat16(),
            wide[:, : heads * width].unflatten(1, (heads, width)),
            torch.randn(num, heads, decays, device=DEVICE),
            torch.randn(num, heads, device=DEVICE) * 2,
        ]

    def make_slots(num: int) -> list[torch.Tensor]:
        nan = float("nan")
        shapes = ((groups, depth), (heads, width), (heads, decays), (heads,))
        records = [torch.full((num, ring_len, *shape), nan, device=DEVICE) for shape in shapes]
        return [
            torch.full((num, heads, depth, width), nan, device=DEVICE),
            records[0].bfloat16(),
            records[1].bfloat16(),
            *records[2:],
        ]

    def call(tokens: list[torch.Tensor], slots: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        return delta(*tokens, dt_bias, A, *slots, rows, chunk_len, plan=TilePlan(*plan) if plan else None)

    name = f"delta H{heads} V{width} G{groups} K{depth} J{decays} C{chunk_len}"
    made = Subject(name, chunk_len, make_tokens, make_slots, call, drafts)
    object.__setattr__(made, "constants", (dt_bias, A))
    return made


def truth(it: Subject, tokens: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the last state in fp64, one token after the other."""
    dt_bias, A = (t.double() for t in it.constants)  # type: ignore[attr-defined]
    q, k, v, a, b = (t.double() for t in tokens)
    g, beta = A[:, None] * F.softplus(a + dt_bias), torch.sigmoid(b)
    per_group = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(per_group, 1), k.repeat_interleave(per_group, 1)
    h, o = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]), []
    for t in range(v.shape[0]):
        h = h * torch.exp(g[t])[:, :, None]
        u = beta[t][:, None] * (v[t] - (h * k[t][:, :, None]).sum(1))
        h = h + k[t][:, :, None] * u[:, None, :]
        o.append((h * q[t][:, :, None]).sum(1))
    return torch.stack(o), h


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


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
def test_every_cut_has_the_plain_bits(sizes: dict, poisoned_empty: None) -> None:
    storm(subject(**sizes), (150, 97, 64, 33, 7), seed=3, longest=90)


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
def test_errs_no_more_than_bf16_outputs(sizes: dict) -> None:
    torch.manual_seed(0)
    it = subject(**sizes)
    tokens = it.make_tokens(192)
    o, state = truth(it, tokens)
    run = plain_run(it, tokens)
    assert error(run.outputs, o) < 2.5e-3
    assert error(run.states[192], state) < 2e-4


PLANS = [
    (16, 1, 1, 1, 16, 1, 3, 1),
    (32, 4, 3, 2, 64, 4, 500, 2),
    (64, 2, 2, 4, 32, 2, 1, 4),
    (128, 2, 2, 4, 64, 4, 7, 2),
]


@pytest.mark.parametrize("plan", PLANS)
def test_tiles_leave_the_bits_alone(plan: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tokens = subject().make_tokens(100)
    one, other = plain_run(subject(), tokens), plain_run(subject(plan=plan), tokens)
    same_bits(other.outputs, one.outputs, "outputs")
    same_bits(other.states[96], one.states[96], "state")
    storm(subject(plan=plan), (150, 33), seed=4, longest=20)


def test_a_slot_beyond_2_to_the_31_numbers() -> None:
    it = subject(heads=32, groups=16)
    num = 2**31 // (32 * 128 * 128) + 3
    tokens = it.make_tokens(40)
    plain = plain_run(it, tokens)
    slots = it.make_slots(num)
    o = it.call(tokens, slots, rows_of((0, 40, 0, num - 1, 0, 0, 0, 0), device=DEVICE))
    same_bits(o, plain.outputs, "outputs")
    same_bits(slots[0][num - 1], plain.states[32], "state")
