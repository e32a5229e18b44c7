"""Mixture of experts against its reference and transformers; exact numerics against itself in any company."""

from dataclasses import dataclass, replace

import pytest
import torch
from kit.grid import form, needs_numba, same_bits

from hemiola.plugins import jit, references
from hemiola.plugins.moe.spec import MOE

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
FITTING = Case(width=32, inner=48)  # multiples of 16, as the compiled form wants them
COMPILED_CASES = [
    FITTING,
    *(replace(FITTING, num_tokens=n) for n in (0, 1, 2, 16, 17, 100, 256, 257)),
    *(replace(FITTING, num_slots=k) for k in (1, 3, 6)),
    replace(FITTING, num_experts=40),  # most of them unused
    replace(FITTING, num_experts=1, num_slots=1),
    *(replace(FITTING, width=w, inner=i) for w, i in ((16, 16), (64, 64), (80, 144), (320, 16))),
    replace(FITTING, one_expert=True, num_slots=1),
]
COMPILED_CASES += [replace(case, activation="swiglu") for case in COMPILED_CASES]
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


@needs_numba
@MODES
@pytest.mark.parametrize("case", COMPILED_CASES, ids=str)
@pytest.mark.usefixtures("poisoned_empty")
def test_compiled_equals_reference(case: Case, exact: bool) -> None:
    arguments = make(case)
    before = [x.clone() for x in arguments[:5]]
    y = form(MOE, "compiled")(*arguments, exact)
    torch.testing.assert_close(y, references.moe(*arguments, exact), **TOLERANCE[case.dtype])
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


@needs_numba
@pytest.mark.parametrize("num_tokens", [1, 256, 257])
def test_unknown_activation_is_refused_by_every_form_in_the_same_words(num_tokens: int) -> None:
    arguments = [*make(replace(FITTING, num_tokens=num_tokens))[:5], "gelu"]
    for exact in (False, True):
        said = []
        for name in ("torch", "compiled", "cpu"):
            with pytest.raises(ValueError) as error:
                form(MOE, name)(*arguments, exact)
            said.append(str(error.value))
        assert len(set(said)) == 1, said


@needs_numba
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("num_tokens,exact", [(300, True), (256, False)], ids=["exact", "fast"])
def test_compiled_bits_do_not_depend_on_neighbours_or_threads(
    num_tokens: int, exact: bool, activation: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = form(MOE, "compiled")
    x, ids, weights, *rest = make(Case(num_tokens, 6, 3, 80, 48, activation))

    def run(chosen: torch.Tensor) -> torch.Tensor:
        return compiled(x[chosen], ids[chosen], weights[chosen], *rest, exact)

    everyone = torch.arange(num_tokens)
    alone = torch.cat([run(token) for token in everyone.split(1)])
    monkeypatch.setattr(jit, "WORTH_A_THREAD", -1)
    for count in (1, 2, 15, 16, 17, 33, 255, 256, 257, 300):
        for start in (0, 5):
            chosen = everyone[start : start + count]
            assert same_bits(run(chosen), alone[chosen]), f"{count} tokens from {start} on"
    shuffled = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(1))
    assert same_bits(run(shuffled), alone[shuffled]), "shuffled"


@needs_numba
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_compiled_bits_do_not_depend_on_who_shares_an_expert(activation: str) -> None:
    """All on one expert, or every token with the others on experts of their own."""
    x, ids, weights, *rest = make(Case(20, 8, 2, 48, 32, activation))
    compiled, one = form(MOE, "compiled"), torch.full_like(ids, 7)
    expected = torch.cat(
        [compiled(x[t : t + 1], one[t : t + 1], weights[t : t + 1], *rest, False) for t in range(20)]
    )
    assert same_bits(compiled(x, one, weights, *rest, False), expected)
    for token in (0, 11, 19):
        mixed = ids.clone()
        mixed[token] = 7
        assert same_bits(compiled(x, mixed, weights, *rest, False)[token], expected[token])


@needs_numba
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_experts_that_nobody_chose_are_not_read(activation: str) -> None:
    x, ids, weights, up, down, _ = make(Case(9, 6, 2, 32, 48, activation))
    ids %= 3
    expected = form(MOE, "compiled")(x, ids, weights, up, down, activation, False)
    up[3:], down[3:] = torch.nan, torch.nan
    y = form(MOE, "compiled")(x, ids, weights, up, down, activation, False)
    assert not y.isnan().any() and same_bits(y, expected)


@needs_numba
def test_columns_of_a_wider_tensor_are_the_tensor() -> None:
    x, ids, weights, *rest = make(replace(FITTING, activation="swiglu"))
    edge = torch.full((len(x), 3), torch.nan)
    columns = torch.cat([edge, x, edge], dim=1)[:, 3:-3]
    crossed = [tensor.mT.contiguous().mT for tensor in (x, ids, weights)]
    for exact in (False, True):
        expected = form(MOE, "compiled")(x, ids, weights, *rest, exact)
        assert same_bits(form(MOE, "compiled")(columns, ids, weights, *rest, exact), expected)
        assert same_bits(form(MOE, "compiled")(*crossed, *rest, exact), expected)


@needs_numba
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_which_form_runs(activation: str) -> None:
    """Many tokens go to a library's GEMMs where bits may differ; it shows in the last ones."""
    fitting = Case(257, 6, 3, 80, 48, activation)
    for num_tokens, exact, name in (
        (256, False, "compiled"),
        (257, False, "torch"),
        (256, True, "compiled"),
        (257, True, "compiled"),
    ):
        arguments = make(replace(fitting, num_tokens=num_tokens))
        y = moe(*arguments, exact)
        other = {"compiled": "torch", "torch": "reference"}[name]
        assert same_bits(y, form(MOE, name)(*arguments, exact)), (num_tokens, exact)
        assert not same_bits(y, form(MOE, other)(*arguments, exact)), (num_tokens, exact)
    for other in (
        replace(fitting, width=72),
        replace(fitting, inner=40),
        replace(fitting, dtype=torch.bfloat16),
    ):
        arguments = make(other)
        assert same_bits(moe(*arguments, True), MOE.in_torch(*arguments, True)), other
