"""mamba2 on CUDA: the bits of the plain run however steps are cut, and the truth in fp64."""

import pytest
import torch
import torch.nn.functional as F
from kit.gpu_steps import Subject, error, plain_run, rows_of, same_bits, storm

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
DEVICE = "cuda" if CUDA else "cpu"
DT = (0.001, 4.0)


def subject(
    heads: int = 4,
    width: int = 64,
    groups: int = 2,
    depth: int = 128,
    chunk_len: int = 32,
    drafts: int = 4,
    plan: tuple[int, ...] | None = None,
    strong: float = 1.0,
) -> Subject:
    from hemiola.plugins.mamba2.cuda import TilePlan, mamba2

    fixed = torch.Generator().manual_seed(1)
    dt_bias, D = (torch.randn(heads, generator=fixed).to(DEVICE) - 2 for _ in range(2))
    A = (-torch.rand(heads, generator=fixed) * 4 * strong - 0.1).to(DEVICE)
    ring_len = chunk_len + drafts

    def make_tokens(num: int) -> list[torch.Tensor]:
        wide = torch.randn(num, heads * width + 2 * groups * depth, device=DEVICE).bfloat16()
        x, B, C = wide.split([heads * width, groups * depth, groups * depth], 1)
        B = B.unflatten(1, (groups, depth)) / depth**0.25
        return [
            x.unflatten(1, (heads, width)),
            B,
            C.unflatten(1, (groups, depth)) / depth**0.25,
            torch.randn(num, heads, device=DEVICE),
        ]

    def make_slots(num: int) -> list[torch.Tensor]:
        nan = float("nan")
        shapes = ((heads, width), (groups, depth), (heads,))
        records = [torch.full((num, ring_len, *shape), nan, device=DEVICE) for shape in shapes]
        return [
            torch.full((num, heads, width, depth), nan, device=DEVICE),
            records[0].bfloat16(),
            records[1].bfloat16(),
            records[2],
        ]

    def call(tokens: list[torch.Tensor], slots: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        return mamba2(
            *tokens, dt_bias, A, D, *slots, rows, chunk_len, *DT, plan=TilePlan(*plan) if plan else None
        )

    name = f"mamba2 H{heads} P{width} G{groups} D{depth} C{chunk_len}"
    made = Subject(name, chunk_len, make_tokens, make_slots, call, drafts)
    object.__setattr__(made, "constants", (dt_bias, A, D))
    return made


def truth(it: Subject, tokens: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the last state in fp64, one token after the other."""
    dt_bias, A, D = (t.double() for t in it.constants)  # type: ignore[attr-defined]
    x, B, C, dt = (t.double() for t in tokens)
    dt = F.softplus(dt + dt_bias).clamp(*DT)
    per_group = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(per_group, 1), C.repeat_interleave(per_group, 1)
    h, y = x.new_zeros(*x.shape[1:], B.shape[2]), []
    for t in range(x.shape[0]):
        h = h * torch.exp(dt[t] * A)[:, None, None] + (dt[t][:, None] * x[t])[:, :, None] * B[t][:, None, :]
        y.append((h * C[t][:, None, :]).sum(-1) + D[:, None] * x[t])
    return torch.stack(y), h


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


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
def test_every_cut_has_the_plain_bits(sizes: dict, poisoned_empty: None) -> None:
    storm(subject(**sizes), (150, 97, 64, 33, 7), seed=3, longest=90)


@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES.keys())
def test_errs_no_more_than_bf16_outputs(sizes: dict) -> None:
    torch.manual_seed(0)
    it = subject(**sizes)
    tokens = it.make_tokens(192)
    y, state = truth(it, tokens)
    run = plain_run(it, tokens)
    assert error(run.outputs, y) < 2.5e-3
    assert error(run.states[192], state) < 1e-4


PLANS = [
    (16, 1, 3, 2, 2, 1, 16, 1, 3),
    (32, 2, 2, 1, 1, 2, 64, 3, 500),
    (64, 1, 1, 2, 3, 4, 32, 2, 1),
    (64, 2, 3, 2, 2, 4, 64, 2, 264),
]


@pytest.mark.parametrize("plan", PLANS)
def test_tiles_leave_the_bits_alone(plan: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tokens = subject().make_tokens(100)
    one, other = plain_run(subject(), tokens), plain_run(subject(plan=plan), tokens)
    same_bits(other.outputs, one.outputs, "outputs")
    same_bits(other.states[96], one.states[96], "state")
    storm(subject(plan=plan), (150, 33), seed=4, longest=20)


def test_a_slot_beyond_2_to_the_31_bytes() -> None:
    it = subject(heads=64, groups=8)
    num = 2**31 // (64 * 64 * 128) + 3
    tokens = it.make_tokens(40)
    plain = plain_run(it, tokens)
    slots = it.make_slots(num)
    y = it.call(tokens, slots, rows_of((0, 40, 0, num - 1, 0, 0, 0, 0), device=DEVICE))
    same_bits(y, plain.outputs, "outputs")
    same_bits(slots[0][num - 1], plain.states[32], "state")
