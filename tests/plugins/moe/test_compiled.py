"""The compiled mixture of experts: a token's bits depend on it, its experts and their weights alone."""

from typing import NamedTuple

import pytest
import torch
from kit.ops import same_bits

from hemiola.plugins.linear.compiled import pack
from hemiola.plugins.moe.compiled import moe
from hemiola.plugins.moe.reference import activate
from tests.plugins.linear.chains import chain, fma
from tests.plugins.linear.test_compiled import DTYPE

NUM_EXPERTS, NUM_SLOTS = 6, 3
SIZES = [(1, 1), (24, 40), (33, 17), (256, 96), (64, 300)]  # F, I


class Layer(NamedTuple):
    up: torch.Tensor  # [E, J, F]
    down: torch.Tensor  # [E, F, I]
    activation: str

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe(x, ids, weights, pack(self.up), pack(self.down), self.activation, self.down.shape[2])


def make(width: int, inner: int, activation: str, halves: bool = True) -> Layer:
    print("seed", 0)
    rng = torch.Generator().manual_seed(0)
    num_hidden = inner * (2 if activation == "swiglu" else 1)
    up = torch.randn(NUM_EXPERTS, num_hidden, width, generator=rng) * width**-0.5
    down = torch.randn(NUM_EXPERTS, width, inner, generator=rng) * inner**-0.5
    if halves:
        up, down = up.bfloat16(), down.bfloat16()
    return Layer(up, down, activation)


def tokens(num_tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, each token's experts and their weights; expert 1 is never chosen, expert 2 most of the time."""
    rng = torch.Generator().manual_seed(1)
    wish = torch.rand(num_tokens, NUM_EXPERTS, generator=rng)
    wish[:, 1], wish[:, 2] = -1, wish[:, 2] + 0.5
    ids = wish.argsort(1, descending=True)[:, :NUM_SLOTS].int()
    return (
        torch.randn(num_tokens, width, generator=rng),
        ids,
        torch.rand(num_tokens, NUM_SLOTS, generator=rng),
    )


@DTYPE
@pytest.mark.parametrize(
    ("width", "inner", "num_tokens"),
    [(*size, num) for size in SIZES for num in (1, 9)] + [(*SIZES[1], 2), (*SIZES[2], 40)],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_every_sum_is_one_chain(width: int, inner: int, num_tokens: int, halves: bool) -> None:
    """Squares need no function that a library rounds in its own way."""
    layer, (x, ids, weights) = make(width, inner, "relu2", halves), tokens(num_tokens, width)
    y = torch.zeros_like(x)
    for slot in range(NUM_SLOTS):
        for expert in range(NUM_EXPERTS):
            taken = (ids[:, slot] == expert).nonzero().flatten()
            hidden = chain(x[taken], layer.up[expert]).relu()
            part = chain(hidden * hidden, layer.down[expert])
            weight = weights[taken, slot : slot + 1].numpy()
            y[taken] = torch.from_numpy(fma(weight, part.numpy(), y[taken].numpy()))
    assert same_bits(layer(x, ids, weights), y)


@pytest.mark.parametrize("width, inner", SIZES)
@pytest.mark.usefixtures("poisoned_empty")
def test_gates_the_value(width: int, inner: int) -> None:
    layer, (x, ids, weights) = make(width, inner, "swiglu"), tokens(20, width)
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(20):
        for expert, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            hidden = activate(layer.up[expert].double() @ x[t].double(), "swiglu")
            expected[t] += weight * (layer.down[expert].double() @ hidden)
    torch.testing.assert_close(layer(x, ids, weights).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [-1, NUM_EXPERTS])
def test_an_expert_that_is_not_there_is_refused(wrong: int) -> None:
    layer, (x, ids, weights) = make(48, 40, "relu2"), tokens(9, 48)
    ids[3, 1] = wrong
    with pytest.raises(ValueError, match=r"an expert is none of 0 .. 5"):
        layer(x, ids, weights)
