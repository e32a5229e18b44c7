"""Kernels that begin while the one before them ends see what it wrote, and spoil nothing that it reads."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from kit.overlap import too_early

pytest.importorskip("triton", reason="needs Triton")

from hemiola.plugins.gate.cuda import gate
from hemiola.plugins.gpu.cover import calls_at
from hemiola.plugins.gpu.device import Gpu
from hemiola.plugins.gpu.overlap import NEWER, RELEASE, WAIT, waiting
from hemiola.plugins.linear.cuda import fused, linear
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


def test_a_kernel_that_does_not_say_when_it_waits_does_so_first() -> None:
    head = ".visible .entry _k(\n\t.param .u64 _k_param_0\n)\n.reqntid 128\n{\n"
    body = "\t.reg .b64 %rd<2>;\n\tld.param.b64 %rd1, [_k_param_0];\n}\n"
    assert waiting(head + body) == f"{head}\t{WAIT}\n\t{RELEASE}\n{body}"
    assert waiting(head + f"\t{WAIT}\n" + body) == head + f"\t{WAIT}\n" + body


def test_an_older_gpu_loses_no_prefetch_but_the_early_ones() -> None:
    early, own = "prefetch.global.L2 [%rd1]; // early %r1", "prefetch.global.L2 [%rd2]; mov.u32 %r2, 0;"
    ptx = "".join(f"\t{line}\n" for line in (early, own, WAIT, RELEASE))
    assert NEWER.sub("", ptx) == f"\t{own}\n"


@pytest.mark.parametrize("capability", [80, 90, 100, 120, 121])
@pytest.mark.parametrize("num_outputs", [1024, 8192])
def test_a_dense_layer_has_weights_fetched_before_it_waits(num_outputs: int, capability: int) -> None:
    """Where lines are long enough to begin with them, and short enough to need it; older GPUs cannot wait."""
    from hemiola.plugins.gpu.compile import compile_call

    layers = []
    for num_inputs in (128, 1024, 4096):
        x, weight, bias = (
            torch.empty(size, dtype=torch.bfloat16, device="meta")
            for size in ((1, num_inputs), (num_outputs, num_inputs), (0,))
        )
        (call,) = calls_at(linear, Gpu(capability, 132), x, weight, bias)
        made = compile_call(call, capability)
        layers.append(made)
        before, _, behind = made.ptx.partition(WAIT)
        assert ("prefetch.global.L2" in before) == (capability >= 90 and num_inputs == 1024)
        assert "prefetch.global" not in behind
    assert too_early(*layers) == []


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
