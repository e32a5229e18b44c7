"""RMS norm against its reference and torch's; a row's bits against the same row in any company."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from kit.grid import COMPILED, form, needs_numba, same_bits

from hemiola.plugins import jit, references
from hemiola.plugins.norm import cpu as norm_cpu
from hemiola.plugins.norm.spec import NORM

norm = torch.ops.hemiola.norm


@dataclass(frozen=True)
class Case:
    num_tokens: int = 5
    width: int = 64
    group_len: int = 64
    gated: bool = False
    gate_first: bool = False
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        changed = [f"{n}={v}" for n, v in self.__dict__.items() if v != getattr(Case, n)]
        return ",".join(changed).replace("torch.", "") or "base"


BASE = Case()
GATED = replace(BASE, gated=True)
CASES = [
    BASE,
    *(replace(BASE, num_tokens=n) for n in (0, 1, 33)),
    *(replace(BASE, width=w, group_len=g) for w, g in ((64, 16), (96, 32), (100, 100), (4096, 512))),
    *(replace(BASE, dtype=d) for d in (torch.bfloat16, torch.float16, torch.float64)),
    replace(BASE, dtype=torch.bfloat16, weight_dtype=torch.bfloat16),
    GATED,
    replace(GATED, gate_first=True),
    replace(GATED, gate_first=True, group_len=16),
    replace(GATED, group_len=16),
    replace(GATED, dtype=torch.bfloat16),
    replace(GATED, gate_first=True, dtype=torch.float64),
]
# fp32 on both sides in another order of the sum; a lower dtype may then round to its neighbour.
RTOL = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


FORMS = pytest.mark.parametrize("name", ["torch", COMPILED])
COMPILED_CASES = [case for case in CASES if case.dtype == torch.float32 and case.group_len % 16 == 0]
COMPILED_CASES += [replace(GATED, width=96, group_len=48), replace(BASE, width=16, group_len=16)]


def make(case: Case, seed: int = 0) -> list:
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(case.num_tokens, case.width, generator=generator) * 3).to(case.dtype)
    gate = (torch.randn(x.shape, generator=generator) * 3).to(case.dtype) if case.gated else x.new_empty(0)
    weight = torch.randn(case.width, generator=generator).to(case.weight_dtype)
    return [x, gate, weight, 1e-5, case.group_len, case.gate_first]


@pytest.mark.parametrize(
    "case,name",
    [pytest.param(case, "torch", id=f"{case}-torch") for case in CASES]
    + [pytest.param(case, "compiled", id=f"{case}-compiled", marks=needs_numba) for case in COMPILED_CASES],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_equals_reference(case: Case, name: str) -> None:
    arguments = make(case)
    before = [x.clone() for x in arguments[:3]]
    y = form(NORM, name)(*arguments)
    expected = references.norm(*arguments)
    torch.testing.assert_close(y, expected, rtol=RTOL[case.dtype], atol=1e-7)
    assert y.is_contiguous()
    for now, then in zip(arguments[:3], before, strict=True):
        assert torch.equal(now, then)


@FORMS
def test_equals_torch_rms_norm(name: str) -> None:
    norm = form(NORM, name)
    x, gate, weight, eps, _, _ = make(BASE)
    torch.testing.assert_close(norm(x, gate, weight, eps, 64, False), F.rms_norm(x, (64,), weight, eps))


@FORMS
def test_gate_before_and_after_are_silu(name: str) -> None:
    """F.silu is the outside word; it rounds differently in the last bit."""
    norm = form(NORM, name)
    x, gate, weight, eps, _, _ = make(GATED)
    first = F.rms_norm(x * F.silu(gate), (64,), weight, eps)
    after = F.rms_norm(x, (64,), weight, eps) * F.silu(gate)
    torch.testing.assert_close(norm(x, gate, weight, eps, 64, True), first, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm(x, gate, weight, eps, 64, False), after, rtol=1e-5, atol=1e-6)


@FORMS
def test_gate_of_large_magnitude_stays_finite(name: str) -> None:
    norm = form(NORM, name)
    x, _, weight, eps, _, _ = make(BASE)
    gate = torch.full_like(x, -200.0)
    assert torch.equal(norm(x, gate, weight, eps, 64, False), torch.zeros_like(x))
    assert torch.equal(
        norm(x, -gate, weight, eps, 64, False), norm(x, x.new_empty(0), weight, eps, 64, False) * 200
    )


@pytest.mark.parametrize(
    "width, group_len, name",
    [
        *((w, g, "torch") for w, g in ((16, 16), (100, 100), (256, 256), (512, 64), (1288, 644))),
        *(pytest.param(w, g, "compiled", marks=needs_numba) for w, g in ((16, 16), (512, 64), (1344, 672))),
    ],
)
@pytest.mark.parametrize("gate", ["none", "first", "after"])
def test_row_bits_do_not_depend_on_neighbours(width: int, group_len: int, name: str, gate: str) -> None:
    """Rows in 1..70, whatever stands in the last scalar elements of torch's loops."""
    norm = form(NORM, name)
    case = Case(640, width, group_len, gated=gate != "none", gate_first=gate == "first")
    x, gates, *rest = make(case)
    expected = norm(x, gates, *rest)
    for num_tokens in range(1, 71):
        for start in (0, 7):
            part = slice(start, start + num_tokens)
            y = norm(x[part], gates[part], *rest)
            assert torch.equal(y, expected[part]), f"{num_tokens} rows from {start} on"


@pytest.mark.parametrize(
    "name,width", [("torch", 100), pytest.param("compiled", 96, marks=needs_numba)], ids=str
)
def test_row_bits_do_not_depend_on_threads(
    name: str, width: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """641 x 100 elements: torch's threads share them at places that are no multiple of a vector."""
    monkeypatch.setattr(jit, "WORTH_A_THREAD", -1)
    norm = form(NORM, name)
    for gate_first in (False, True):
        x, gates, *rest = make(Case(641, width, width // 2, gated=True, gate_first=gate_first))
        torch.set_num_threads(1)
        expected = torch.cat([norm(x[t : t + 1], gates[t : t + 1], *rest) for t in range(641)])
        torch.set_num_threads(threads)
        assert torch.equal(norm(x, gates, *rest), expected)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_pieces_change_no_bit(gated: bool, gate_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long steps are computed some rows at a time."""
    rng = torch.Generator().manual_seed(3)
    x, gate = (torch.randn(37, 96, generator=rng)[:, :64] for _ in range(2))
    arguments = (x, gate if gated else torch.empty(0), torch.randn(64, generator=rng), 1e-5, 16, gate_first)
    whole = NORM.in_torch(*arguments)
    for rows in (1, 5, 36):
        monkeypatch.setattr(norm_cpu, "IN_CACHE", 64 * rows + 1)
        assert torch.equal(NORM.in_torch(*arguments), whole)


@FORMS
@pytest.mark.parametrize("gate_first", [False, True])
def test_columns_of_a_wider_tensor_are_the_tensor(gate_first: bool, name: str) -> None:
    x, gate, *rest = make(replace(GATED, group_len=32, gate_first=gate_first))
    edge = torch.full((5, 3), torch.nan)
    wide = torch.cat([edge, x, edge, gate, edge], dim=1)
    columns = (wide[:, 3:67], wide[:, 70:134])
    crossed = (x.mT.contiguous().mT, gate.mT.contiguous().mT)
    expected = form(NORM, name)(x, gate, *rest)
    assert same_bits(form(NORM, name)(*columns, *rest), expected)
    if name == "compiled":  # torch adds the numbers of crossed lines in another order
        assert same_bits(form(NORM, name)(*crossed, *rest), expected)


@needs_numba
def test_fp32_of_fitting_sizes_is_compiled_and_the_rest_is_not() -> None:
    """Which form ran shows in the last bits, or in an op whose torch form says that it was called."""
    arguments = make(replace(GATED, num_tokens=50))
    assert same_bits(norm(*arguments), form(NORM, "compiled")(*arguments))
    assert not same_bits(norm(*arguments), NORM.in_torch(*arguments))
    others = [
        make(replace(GATED, dtype=torch.float64)),
        make(replace(GATED, dtype=torch.bfloat16)),
        make(replace(BASE, weight_dtype=torch.bfloat16)),
        make(replace(GATED, width=100, group_len=50)),
        make(replace(GATED, width=96, group_len=24)),
    ]
    for other in others:
        assert same_bits(norm(*other), NORM.in_torch(*other))
