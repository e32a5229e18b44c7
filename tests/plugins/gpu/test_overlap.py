"""Kernels that begin while the one before them ends see what it wrote, and spoil nothing that it reads."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from hemiola.plugins.gate.cuda import gate
from hemiola.plugins.linear.cuda import fused
from hemiola.plugins.norm.cuda import norm

WIDTH, WIDE = 1024, 24576  # a short product of few blocks, and a long one of many
NUM_LINKS, REPLAYS = 60, 40

Link = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def links() -> list[Link]:
    """Kernels of 1 to 50 us; each reads what the last one wrote, and some what the one before that did."""
    scale, none = torch.ones(WIDTH, device="cuda"), torch.empty(0, device="cuda", dtype=torch.bfloat16)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").mul_(shape[1] ** -0.5).bfloat16()

    small, up, down = weight(WIDTH, WIDTH), weight(WIDE, WIDTH), weight(WIDTH, WIDE // 2)
    return [
        lambda x, before: norm(x, none, scale, 1e-6, WIDTH, False),
        lambda x, before: norm(x, before, scale, 1e-6, WIDTH, True),
        lambda x, before: gate(x, before, "sigmoid"),
        lambda x, before: fused(x, small),
        lambda x, before: fused(x, small, residual=before),
        lambda x, before: fused(fused(x, up, activation="swiglu"), down),
        lambda x, before: torch.tanh(x) + before,  # launched by torch: waits for all, and all wait for it
    ]


def chained(chosen: list[Link], x: torch.Tensor, between: Callable[[], object]) -> torch.Tensor:
    """All results of a chain. Most of its memory is used again and again."""
    before, kept = x, []
    for link in chosen:
        x, before = link(x, before), x
        between()
        kept.append(x[:, ::97].clone() if len(kept) % 7 == 0 else x.new_empty(0))
    return torch.cat([x.flatten(), *(some.flatten() for some in kept)])


@pytest.fixture
def on_demand() -> Iterator[None]:
    from hemiola.plugins.gpu import compile

    compile.on_demand()
    with torch.inference_mode():
        yield


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 300])
def test_a_chain_has_the_bits_of_kernels_that_run_alone(on_demand: None, num_tokens: int, seed: int) -> None:
    """Eager and in a graph, many times; other numbers each time, so that what came too early is seen."""
    print("seed", seed)
    torch.manual_seed(seed)
    dice, own = random.Random(seed), links()
    chosen = [dice.choice(own) for _ in range(NUM_LINKS)] + own
    x = torch.randn(num_tokens, WIDTH, device="cuda").bfloat16()
    chained(chosen, x, torch.cuda.synchronize)  # all kernels are there
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = chained(chosen, x, lambda: None)
    last = torch.empty(0, device="cuda")
    for _, is_graph in itertools.product(range(REPLAYS), (True, False)):
        x.copy_(torch.randn_like(x, dtype=torch.float32))
        wanted = chained(chosen, x, torch.cuda.synchronize)
        if is_graph:
            replayed.fill_(float("nan"))
            graph.replay()
        found = replayed if is_graph else chained(chosen, x, lambda: None)
        assert not wanted.isnan().any() and torch.equal(found, wanted), "graph" if is_graph else "eager"
        assert not torch.equal(wanted, last)  # else nothing could come too early
        last = wanted
