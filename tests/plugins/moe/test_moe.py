"""Mixture of experts against its reference and transformers; exact numerics against itself in any company."""

from dataclasses import dataclass, replace

import pytest
import torch

from hemiola.plugins import references

moe = torch.ops.hemiola.moe
MODES = pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])


@dataclass(frozen=True)
class Case:
    num_tokens: int = 7
    num_experts: int = 6
    num_slots: int = 2
    width: int = 24
    inner: int = 40
    activation: str = "relu2"
    dtype: torch.dtype = torch.float32
    one_expert: bool = False

    def __str__(self) -> str:
        changed = [f"{n}={v}" for n, v in self.__dict__.items() if v != getattr(Case, n)]
        return ",".join(changed).replace("torch.", "") or "base"


BASE = Case()
CASES = [
    BASE,
    *(replace(BASE, num_tokens=n) for n in (0, 1, 2, 33, 100)),
    *(replace(BASE, num_slots=k) for k in (1, 3, 6)),
    replace(BASE, num_slots=6, num_tokens=1),
    replace(BASE, num_experts=40),
    replace(BASE, num_experts=1, num_slots=1),
    replace(BASE, width=320, inner=16),
    replace(BASE, inner=300),
    replace(BASE, activation="swiglu"),
    replace(BASE, activation="swiglu", num_tokens=1),
    replace(BASE, activation="swiglu", inner=17),
    replace(BASE, one_expert=True, num_slots=1),
    *(replace(BASE, dtype=d) for d in (torch.bfloat16, torch.float16, torch.float64)),
    replace(BASE, dtype=torch.bfloat16, activation="swiglu"),
]
# fp32 on both sides in another order of the sum; a lower dtype may then round to its neighbour.
TOLERANCE = {
    torch.float64: {"rtol": 1e-11, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-9, "atol": 1e-3},
    torch.bfloat16: {"rtol": 2**-6, "atol": 1e-2},
}


def make(case: Case, seed: int = 0) -> list:
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    chosen = torch.rand(case.num_tokens, case.num_experts, generator=generator).argsort(1)[
        :, : case.num_slots
    ]
    if case.one_expert:
        chosen = torch.full_like(chosen, 3)
    weights = torch.rand(case.num_tokens, case.num_slots, generator=generator)
    inner = case.inner * (2 if case.activation == "swiglu" else 1)
    up = normal(case.num_experts, inner, case.width) * case.width**-0.5
    down = normal(case.num_experts, case.width, case.inner) * case.inner**-0.5
    return [normal(case.num_tokens, case.width), chosen.int(), weights, up, down, case.activation]


@MODES
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("poisoned_empty")
def test_equals_reference(case: Case, exact: bool) -> None:
    arguments = make(case)
    before = [x.clone() for x in arguments[:5]]
    y = moe(*arguments, exact)
    expected = references.moe(*arguments, exact)
    torch.testing.assert_close(y, expected, **TOLERANCE[case.dtype])
    assert y.is_contiguous()
    for now, then in zip(arguments[:5], before, strict=True):
        assert torch.equal(now, then)


@MODES
def test_equals_transformers_experts(exact: bool) -> None:
    """NemotronH's own experts in eager mode; fp32 sums in other orders."""
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    x, ids, weights, up, down, activation = make(replace(BASE, num_tokens=40))
    config = modeling.NemotronHConfig(
        hidden_size=24, moe_intermediate_size=40, n_routed_experts=6, mlp_hidden_act="relu2"
    )
    config._experts_implementation = "eager"
    experts = modeling.NemotronHExperts(config)
    experts.load_state_dict({"up_proj": up, "down_proj": down})
    with torch.no_grad():
        expected = experts(x, ids.long(), weights)
    torch.testing.assert_close(
        moe(x, ids, weights, up, down, activation, exact), expected, rtol=1e-5, atol=1e-5
    )


@MODES
def test_slots_add_up_in_order(exact: bool) -> None:
    """1e8 - 1e8 + 1 is 1 in slot order only."""
    x = torch.ones(3, 16)
    up = torch.full((3, 16, 16), 1 / 16)
    down = torch.full((3, 16, 16), 1 / 16)
    ids = torch.tensor([[2, 0, 1], [0, 1, 2], [1, 2, 0]], dtype=torch.int32)
    weights = torch.tensor([[1e8, -1e8, 1.0]]).expand(3, -1).contiguous()
    y = moe(x, ids, weights, up, down, "relu2", exact)
    assert torch.equal(y, torch.ones_like(x))


@MODES
def test_unknown_activation_is_refused(exact: bool) -> None:
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        moe(*make(BASE)[:5], "gelu", exact)


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("width, inner", [(24, 40), (64, 100), (320, 300)])
def test_exact_bits_do_not_depend_on_neighbours(width: int, inner: int, activation: str) -> None:
    case = Case(100, 6, 3, width, inner, activation)
    x, ids, weights, *rest = make(case)
    expected = moe(x, ids, weights, *rest, True)
    for num_tokens in (1, 2, 8, 31, 32, 33, 64):
        for start in (0, 5):
            part = slice(start, start + num_tokens)
            y = moe(x[part], ids[part], weights[part], *rest, True)
            assert torch.equal(y, expected[part]), f"{num_tokens} tokens from {start} on"
    shuffled = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    y = moe(x[shuffled], ids[shuffled], weights[shuffled], *rest, True)
    assert torch.equal(y, expected[shuffled]), "shuffled"


def test_exact_bits_do_not_depend_on_threads(threads: int) -> None:
    x, ids, weights, *rest = make(Case(100, 4, 2, 1288, 64, "swiglu"))
    torch.set_num_threads(1)
    expected = moe(x, ids, weights, *rest, True)
    torch.set_num_threads(threads)
    for num_tokens in (1, 33, 100):
        y = moe(x[:num_tokens], ids[:num_tokens], weights[:num_tokens], *rest, True)
        assert torch.equal(y, expected[:num_tokens]), f"{num_tokens} tokens"
