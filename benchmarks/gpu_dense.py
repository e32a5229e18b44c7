"""Dense layers on a GPU against cuBLAS: time, share of the floor, and bits of every tile, in one run.

PYTHONPATH=. python benchmarks/gpu_dense.py [MODES] [--tokens 1,16] [--shapes "9b out"] [--ends "9b down"]
Modes, by commas. sweep: every tile that could be chosen; table: those that plugins/gpu/tiles.py chooses;
fused: layers with what ends them, beside the launches apart; experts; small: what is no product;
conv: the convolution before a recurrence.
"""

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hemiola.plugins.conv.cuda import conv
from hemiola.plugins.embed.cuda import embed
from hemiola.plugins.gate.cuda import gate
from hemiola.plugins.gpu.compile import on_demand
from hemiola.plugins.gpu.tiles import Tile, table_of
from hemiola.plugins.linear.cuda import best
from hemiola.plugins.linear.cuda import fused as product
from hemiola.plugins.moe.cuda import moe
from hemiola.plugins.norm.cuda import norm
from hemiola.plugins.rope.cuda import rope
from hemiola.plugins.route.cuda import route

L2_BYTES = 300 << 20  # weights that take turns, so that none comes from the cache
SHAPES = {  # outputs, inputs
    "9b qkvz": (12352, 4096),
    "9b out": (4096, 4096),
    "9b gate_up": (24576, 4096),
    "9b down": (4096, 12288),
    "nano3 in": (10304, 2688),
    "nano3 out": (2688, 4096),
    "0.8b down": (1024, 3584),
    "nano9 up": (15680, 4480),
    "9b head": (248320, 4096),
    "nano3 head": (131072, 2688),
}
ENDS = {  # what a layer ends with
    "9b gate_up": "swiglu",
    "9b down": "residual",
    "9b out": "residual",
    "0.8b down": "residual",
    "nano9 up": "relu2",
    "9b head": "argmax",
    "nano3 head": "argmax",
}
EXPERTS = {  # experts, slots, width, inner, activation
    "nano3": (128, 6, 2688, 1856, "relu2"),
    "qwen 35b-a3b": (256, 8, 2048, 512, "swiglu"),
}
EXPERT_TILES = (
    (64, 16, 128, 4, 4, True), (64, 16, 64, 4, 6, True), (128, 16, 64, 4, 5, True),
    (128, 16, 128, 4, 4, True), (128, 16, 64, 4, 8, True), (64, 32, 64, 4, 5, True),
    (128, 32, 64, 4, 5, True), (128, 64, 64, 4, 4, True), (256, 128, 64, 8, 3, False),
    (256, 128, 64, 8, 4, False, True), (128, 128, 64, 4, 5, False, True),
    (256, 64, 64, 8, 4, False, True), (256, 64, 64, 4, 4, False, True), (128, 64, 64, 4, 6, False, True),
)  # fmt: skip
WORDS = {True: "equal", False: "OTHER BITS"}
TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)


def say(*cells: object) -> None:
    """A line of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def begin(*names: str) -> None:
    """A table."""
    print()
    say(*names)
    say(*["---"] * len(names))


def candidates(num_tokens: int) -> list:
    """Tiles that could serve so many tokens."""
    tile, wide = Tile, [many.tile for many in table_of(90).many]
    if num_tokens <= 16:
        few = [(16, 256, 4, 4), (32, 128, 4, 5), (64, 128, 4, 4), (64, 64, 4, 6)]
        persistent = [(64, 128, 4, 6), (64, 256, 4, 4), (128, 128, 4, 5), (32, 256, 4, 5), (32, 512, 4, 3),
                      (16, 512, 4, 4)]  # fmt: skip
        made = [tile(o, 16, i, w, s, True) for o, i, w, s in few]
        return made + [tile(o, 16, i, w, s, True, True) for o, i, w, s in persistent]
    if num_tokens <= 64:
        few = [(64, 32, 128, 4, 5), (64, 32, 64, 4, 6), (64, 64, 64, 4, 6), (128, 64, 64, 4, 4),
               (128, 64, 64, 8, 5), (64, 64, 64, 4, 8), (32, 64, 128, 4, 5)]  # fmt: skip
        persistent = [(64, 32, 128, 4, 5), (128, 32, 64, 4, 6), (64, 64, 128, 4, 5), (128, 64, 64, 4, 6),
                      (32, 64, 256, 4, 4), (64, 16, 256, 4, 4)]  # fmt: skip
        made = [tile(o, t, i, w, s, True) for o, t, i, w, s in few if t <= num_tokens]
        return made + [tile(o, t, i, w, s, True, True) for o, t, i, w, s in persistent if t <= num_tokens]
    grouped = [wide[0]._replace(group=16), wide[0]._replace(group=32), wide[1]._replace(stages=4, group=16)]
    return wide + (grouped if num_tokens > 2048 else [])


def compile_one(tile: Tile) -> None:
    """Fills the disk cache with one tile's kernel, in a process of its own."""
    on_demand()
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    try:
        product(x, torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16), tile=tile)
    except Exception as error:
        print("cannot be compiled", tile, str(error)[:200], flush=True)


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def contest(*contenders: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of one call of each, medians of replays in turns: a warm GPU lowers its clock for all alike."""
    graphs, times = [captured(calls) for calls in contenders], [[] for _ in contenders]
    for _ in range(9):
        for graph, took, calls in zip(graphs, times, contenders, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            took.append(start.elapsed_time(end) / len(calls) / 1e3)
    return [statistics.median(took[2:]) for took in times]


def seconds(calls: list[Callable[[], object]]) -> float:
    """Of one call, the median of replays of a graph that holds them all."""
    return contest(calls)[0]


def copy_bandwidth() -> float:
    """Bytes per second, read and written."""
    a, b = (torch.empty(1 << 28, dtype=torch.float32, device="cuda") for _ in range(2))
    return 2 * a.nbytes / seconds([lambda: torch.add(a, 1.0, out=b)] * 8)


def rotated(weight: torch.Tensor) -> list[torch.Tensor]:
    """Copies of a weight that the cache cannot hold together."""
    copies = [weight] + [weight.clone() for _ in range(max(1, min(15, L2_BYTES // weight.nbytes)))]
    return copies * (1 if len(copies) > 3 else 3)


def measure(name: str, tokens: tuple[int, ...], bandwidth: float, is_sweep: bool) -> None:
    """One layer: cuBLAS, the floor, our tiles, and whether they give a row the bits it has alone."""
    num_outputs, num_inputs = SHAPES[name]
    weight = torch.randn(num_outputs, num_inputs, device="cuda", dtype=torch.bfloat16) * num_inputs**-0.5
    rows = torch.randn(max(tokens), num_inputs, device="cuda", dtype=torch.bfloat16)
    lone = {row: product(rows[row : row + 1], weight) for row in {0} | {t // 2 for t in tokens}}
    copies = rotated(weight)
    for num_tokens in tokens:
        x, turns = rows[:num_tokens], copies if num_tokens <= 512 else [weight] * 3
        by_library = [partial(torch.mm, x, w.t()) for w in turns]
        moved = 2 * (weight.numel() + num_tokens * (num_inputs + num_outputs)) / bandwidth
        floor = max(moved, 2 * num_tokens * weight.numel() / 790e12)
        found = []
        for tile in candidates(num_tokens) if is_sweep else [None]:
            try:
                y = product(x, weight, tile=tile)
                library, took = contest(by_library, [partial(product, x, w, tile=tile) for w in turns])
            except Exception as error:
                say(name, num_tokens, tuple(tile or ()), type(error).__name__, str(error)[:60])
                continue
            same = all(torch.equal(y[r : r + 1], lone[r]) for r in (0, num_tokens // 2))
            found.append((took / library, took, library, tile, same))
        exact = x[:64].double() @ weight.double().t()
        error = ((product(x, weight)[:64].double() - exact).norm() / exact.norm()).item()
        best, others = sorted(found, key=lambda f: f[0])[:6], [f for f in found if not f[-1]]
        for ratio, took, library, tile, same in dict.fromkeys([*best, *others]):
            say(f"{name} {num_outputs}x{num_inputs}", num_tokens,
                f"{library * 1e6:.1f}", f"{floor * 1e6:.1f}",
                f"{took * 1e6:.1f}", f"{ratio:.3f}", f"{floor / took:.0%}", f"{error:.1e}", WORDS[same],
                tuple(tile or ()))  # fmt: skip


def one_launch(
    end: str, x: torch.Tensor, residual: torch.Tensor, none: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """A layer with what ends it."""
    if end == "argmax":
        return best(x, weight, none)[1]
    return product(x, weight, None, residual if end == "residual" else None, end.replace("residual", "none"))


def apart(
    end: str, x: torch.Tensor, residual: torch.Tensor, none: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """The launches that one replaces."""
    y = product(x, weight)
    match end:
        case "swiglu":
            gates, values = y.chunk(2, dim=1)
            return gate(values, gates, "silu")
        case "relu2":
            y = y.relu()
            return y * y
        case "argmax":
            return y.float().argmax(1)
        case _:
            return residual + y


def measure_fused(names: list[str], tokens: tuple[int, ...], bandwidth: float) -> None:
    """Layers with what ends them."""
    begin("layer", "end", "tokens", "cuBLAS alone, us", "ours alone", "apart", "fused", "of apart", "bits")
    none = torch.empty(0, device="cuda", dtype=torch.bfloat16)
    for name in names:
        end, (num_outputs, num_inputs) = ENDS[name], SHAPES[name]
        weight = torch.randn(num_outputs, num_inputs, device="cuda", dtype=torch.bfloat16) * num_inputs**-0.5
        copies = rotated(weight) if weight.nbytes < L2_BYTES else [weight] * 2
        rows = torch.randn(max(tokens), num_inputs, device="cuda", dtype=torch.bfloat16)
        width = num_outputs if end == "residual" else 0
        before = torch.randn(max(tokens), width, device="cuda", dtype=torch.bfloat16)
        for num_tokens in tokens if end != "argmax" else [num for num in tokens if num <= 256]:
            x, given = rows[:num_tokens], (end, rows[:num_tokens], before[:num_tokens], none)
            library, plain, several, one = contest(
                [partial(torch.mm, x, w.t()) for w in copies],
                *([partial(f, w) for w in copies] for f in (partial(product, x), partial(apart, *given))),
                [partial(one_launch, *given, w) for w in copies],
            )
            found, middle = one_launch(*given, weight), slice(num_tokens // 2, num_tokens // 2 + 1)
            same = torch.equal(found[middle], one_launch(end, x[middle], given[2][middle], none, weight))
            if end == "argmax":
                same = same and torch.equal(found, apart(*given, weight))
            say(name, end, num_tokens, *(f"{took * 1e6:.1f}" for took in (library, plain, several, one)),
                f"{one / several:.3f}", WORDS[same])  # fmt: skip
        del weight, copies, rows, before


def measure_experts(bandwidth: float) -> None:
    """Experts against the bytes of those that were chosen, and the products."""
    begin("experts", "tokens", "experts chosen", "us", "floor", "of it", "bits", "tile")
    for name, (experts, slots, width, inner, activation) in EXPERTS.items():
        rows = (2 if activation == "swiglu" else 1) * inner
        up = torch.randn(experts, rows, width, device="cuda", dtype=torch.bfloat16) * width**-0.5
        down = torch.randn(experts, width, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5
        for num_tokens in (1, 4, 8, 64, 256, 1024, 8192):
            x = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16)
            turns = []
            for _ in range(8 if num_tokens < 1024 else 2):
                ids = torch.rand(num_tokens, experts, device="cuda").topk(slots).indices.int()
                turns.append((x, ids, torch.rand(num_tokens, slots, device="cuda"), up, down, activation))
            distinct = sum(len(turn[1].unique()) for turn in turns) / len(turns)
            size = (rows + inner) * width
            floor = max(2 * distinct * size / bandwidth, 2 * num_tokens * slots * size / 790e12)
            lone = moe(x[:1], *(part[:1] for part in turns[0][1:3]), *turns[0][3:])
            same, found = torch.equal(moe(*turns[0])[:1], lone), []
            crowd = num_tokens * slots / experts
            for tile in (Tile(*shape) for shape in EXPERT_TILES):
                if tile.tokens > max(16, 4 * crowd) or tile.tokens * 16 < crowd:
                    continue
                try:
                    found.append((seconds([partial(moe, *turn, tile=tile) for turn in turns]), tile))
                    same = same and torch.equal(moe(*turns[0], tile=tile)[:1], lone)
                except Exception as error:
                    say(name, num_tokens, tuple(tile), type(error).__name__, str(error)[:60])
            chosen = seconds([partial(moe, *turn) for turn in turns])
            for took, tile in ((chosen, "the table's"), *((s, tuple(t)) for s, t in sorted(found)[:3])):
                say(name, num_tokens, f"{distinct:.0f}", f"{took * 1e6:.1f}", f"{floor * 1e6:.1f}",
                    f"{floor / took:.0%}", WORDS[same], tile)  # fmt: skip


def conv_of_rows(num_rows: int, num_tokens: int) -> tuple[float, list[Callable[[], object]]]:
    """Bytes that a step of the 9B's conv moves, and calls of it whose columns take turns."""
    width, taps, chunk_len, ring_len = 8192, 4, 16, 22
    x = torch.randn(num_rows * num_tokens, width + 4160, device="cuda", dtype=torch.bfloat16)[:, :width]
    weight, bias = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((width, taps), (width,)))
    slots = torch.randn(num_rows + 1, ring_len, width, device="cuda").bfloat16()
    drafts = num_tokens - 1 if num_tokens < chunk_len else 0
    rows = [
        (n * num_tokens, num_tokens, drafts, n + 1, 160 + n % chunk_len, 160, 0, 0) for n in range(num_rows)
    ]
    step = torch.tensor(rows, dtype=torch.int32, device="cuda")
    copies = [slots.clone() for _ in range(max(1, min(24, L2_BYTES // slots.nbytes)))]
    lines = num_rows * (2 * num_tokens + taps - 1 + min(num_tokens, chunk_len))
    return lines * 2 * width, [partial(conv, x, weight, bias, columns, step, chunk_len) for columns in copies]


def measure_conv(bandwidth: float) -> None:
    """The 9B's: rows of one token, of one and three drafts, a prompt."""
    begin("conv of 8192 channels", "us", "floor", "of it")
    for num_rows, num_tokens in ((1, 1), (1, 4), (64, 1), (64, 4), (256, 4), (1, 512), (1, 2048), (1, 8192)):
        moved, calls = conv_of_rows(num_rows, num_tokens)
        took, floor = seconds(calls), moved / bandwidth
        say(f"{num_rows} x {num_tokens}", f"{took * 1e6:.2f}", f"{floor * 1e6:.2f}", f"{floor / took:.0%}")


def measure_small(bandwidth: float) -> None:
    """What only moves bytes."""
    begin("op", "tokens", "us", "floor", "of it")
    absent = torch.empty(0, device="cuda", dtype=torch.bfloat16)
    table = torch.randn(4096, 2, 32, device="cuda")
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    vocabulary = torch.randn(100_000, 4096, device="cuda", dtype=torch.bfloat16)
    for num_tokens in (1, 64, 8192):
        x, z = (torch.randn(num_tokens, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        wide, opening = (
            torch.randn(num_tokens, 12288, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        places = torch.randint(4096, (num_tokens,), device="cuda", dtype=torch.int32)
        scores = torch.randn(num_tokens, 256, device="cuda")
        cases = {  # name: lines of 4096 bfloat16 that it moves per token, call
            "norm": (2, partial(norm, x, absent, weight, 1e-6, 4096, False)),
            "norm by head, gated": (3, partial(norm, x, z, weight, 1e-6, 128, False)),
            "norm in 8 groups, gate first": (3, partial(norm, x, z, weight, 1e-6, 512, True)),
            "gate of 12288": (9, partial(gate, wide, opening, "silu")),
            "rope of 16 heads of 256": (2, partial(rope, x.view(-1, 16, 256), places, table)),
            "embed": (2, partial(embed, vocabulary, places)),
            "route 256 to 8": (0.125, partial(route, scores, absent, "softmax", 8, 1, 1, True, 1.0)),
        }
        for name, (share, run) in cases.items():
            took, floor = seconds([run] * 20), share * x.nbytes / bandwidth
            say(name, num_tokens, f"{took * 1e6:.2f}", f"{floor * 1e6:.2f}", f"{floor / took:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("modes", nargs="?", default="table,fused,experts,small,conv")
    parser.add_argument("--shapes", default=",".join(name for name in SHAPES if "head" not in name))
    parser.add_argument("--ends", default=",".join(ENDS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_dense.py: torch finds no CUDA device here")
    on_demand()
    tokens = tuple(map(int, args.tokens.split(",")))

    if "sweep" in args.modes:
        jobs = list(dict.fromkeys(tile for t in tokens for tile in candidates(t)))
        with multiprocessing.get_context("spawn").Pool(14) as pool:
            pool.map(compile_one, jobs, chunksize=2)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    for mode in args.modes.split(","):
        if mode in ("sweep", "table"):
            begin(
                "layer",
                "tokens",
                "cuBLAS, us",
                "floor",
                "ours",
                "over cuBLAS",
                "of the floor",
                "error",
                "bits",
                "tile",
            )
            for name in args.shapes.split(","):
                measure(name, tokens, bandwidth, mode == "sweep")
        else:
            measures = {
                "fused": partial(measure_fused, args.ends.split(","), tokens),
                "experts": measure_experts,
                "small": measure_small,
                "conv": measure_conv,
            }
            measures[mode](bandwidth)


if __name__ == "__main__":
    main()
