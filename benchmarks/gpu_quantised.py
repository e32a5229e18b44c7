"""Quantised weights on a GPU beside our bf16 kernel and cuBLAS: time, bandwidth and bits in one run.

    PYTHONPATH=. python benchmarks/gpu_quantised.py [table,experts,sweep,tiles] [--kinds fp8,int4]
        [--rows 1,64] [--inner 512] [--shapes up,6144x2048]

table: dense layers of the 9B and its head, as plugins/gpu/tables chooses tiles. experts: those of the
35B-A3B; of a rank of two with --inner 256. sweep: other tiles of dense layers, too; tiles: of experts. Every
line says whether two rows have the bits that they have alone, or those of the table's tile.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from gpu_dense import WORDS, begin, contest, copy_bandwidth, rotated, say

from hemiola.builder.formats.rounded import rounded
from hemiola.plugins import inputs
from hemiola.plugins.gpu.compile import TooLarge, compile_call, on_demand
from hemiola.plugins.gpu.cover import calls_at
from hemiola.plugins.gpu.device import H200
from hemiola.plugins.gpu.launch import Call
from hemiola.plugins.gpu.lines import pack_lines
from hemiola.plugins.gpu.tiles import Tile, table_of
from hemiola.plugins.gpu.words import pack_words
from hemiola.plugins.groups import Layout, WeightGroup, dequantised
from hemiola.plugins.linear import coded, e4m3
from hemiola.plugins.linear import cuda as plain
from hemiola.plugins.moe import coded as coded_moe
from hemiola.plugins.moe import cuda as plain_moe
from hemiola.plugins.moe import e4m3 as e4m3_moe

KINDS = {
    "fp8": Layout("e4m3", 128),
    "fp8row": Layout("e4m3", 0),
    "int8": Layout("int8", 128),
    "int4": Layout("int4", 128),
    "int4z": Layout("int4", 128, ("zeros",)),
    "int4g32": Layout("int4", 32),
    "nvfp4": Layout("e2m1", 16, ("factor",)),
    "w8a8": Layout("e4m3", 128, (), "group"),
    "w8a8row": Layout("e4m3", 0, (), "token"),
}
SHAPES = {"up": (12288, 4096), "down": (4096, 12288), "out": (4096, 4096), "head": (248320, 4096)}
EXPERTS, SLOTS, WIDTH, INNER = 256, 8, 2048, 512
ROWS = (1, 16, 64, 256, 8192)
SWEEP = {  # by the most rows: outputs, rows, inputs of a turn, warps, stages, steps side by side, consumers
    16: [
        (16, 16, 256, 4, 3, 4), (16, 16, 256, 4, 2, 4), (32, 16, 256, 4, 2, 4), (64, 16, 256, 4, 3, 4),
        (64, 16, 256, 4, 2, 4), (64, 16, 128, 4, 4, 0), (128, 16, 128, 4, 4, 0), (32, 16, 256, 4, 3, 4),
    ],
    64: [
        (32, 16, 256, 4, 3, 4), (32, 16, 256, 4, 2, 4), (32, 32, 256, 4, 3, 4), (16, 32, 256, 4, 3, 4),
        (64, 32, 128, 4, 3, 4), (64, 32, 128, 4, 2, 4), (64, 16, 256, 4, 3, 4), (128, 64, 128, 8, 4, 0),
        (64, 64, 128, 4, 4, 0), (64, 16, 128, 4, 4, 0), (128, 16, 128, 4, 4, 0), (64, 32, 128, 4, 4, 0),
        (16, 16, 256, 4, 3, 4), (128, 32, 128, 4, 4, 0), (32, 64, 256, 4, 2, 4),
    ],
    256: [(64, 64, 128, 4, 4, 0), (128, 128, 128, 8, 3, 0), (128, 128, 64, 4, 6, 0, 2)],
    8192: [(128, 128, 64, 4, 6, 0, 2), (192, 128, 64, 4, 6, 0, 3)],
}  # fmt: skip

OF_EXPERTS = {  # by the most rows
    64: [
        (16, 16, 256, 4, 3, 4), (32, 16, 256, 4, 2, 4), (64, 16, 128, 4, 4, 0), (64, 16, 128, 4, 6, 0),
        (128, 16, 128, 4, 4, 0), (128, 16, 128, 4, 6, 0), (128, 16, 256, 4, 3, 0), (256, 16, 128, 8, 4, 0),
        (128, 32, 128, 4, 4, 0),
    ],
    512: [
        (128, 16, 128, 4, 4, 0), (128, 32, 128, 4, 4, 0), (128, 64, 128, 4, 3, 0), (64, 32, 128, 4, 4, 0),
        (256, 32, 128, 8, 3, 0),
    ],
    8192: [
        (128, 64, 128, 4, 2, 0), (128, 64, 128, 4, 3, 0), (128, 64, 128, 4, 4, 0), (128, 64, 256, 4, 2, 0),
        (128, 128, 128, 4, 3, 0), (128, 32, 128, 4, 3, 0), (256, 64, 128, 8, 2, 0),
    ],
}  # fmt: skip
FEW = [  # by gluon_few.py: outputs, warps, steps of a warp under way, programs of a multiprocessor
    (16, 4, 4, 3), (16, 4, 4, 5), (16, 4, 2, 5), (16, 4, 2, 8), (16, 8, 2, 2), (16, 8, 2, 4), (16, 16, 1, 2),
    (16, 16, 2, 2), (32, 4, 2, 4),
]  # fmt: skip


def shape_of(name: str) -> tuple[int, int]:
    """A layer's outputs and inputs, by its name or as "6144x2048"."""
    outputs, _, width = name.partition("x")
    return (int(outputs), int(width)) if width else SHAPES[name]


def moe_of(layout: Layout) -> Callable[..., torch.Tensor]:
    return e4m3_moe.moe if layout.inputs else coded_moe.moe


def pack_of(layout: Layout) -> Callable[[WeightGroup], torch.Tensor]:
    return pack_lines if layout.inputs else pack_words


class Weight(NamedTuple):
    """A random weight, and as it is packed."""

    half: torch.Tensor
    packed: torch.Tensor
    group: WeightGroup


def quantised(layout: Layout, *shape: int) -> WeightGroup:
    """Random numbers on the GPU, rounded to nearest, some rows or experts at a time."""
    plain = layout._replace(others=tuple(name for name in layout.others if name != "zeros"))
    parts = torch.randn(*shape, device="cuda").split(32768 if len(shape) == 2 else 16)
    groups = [with_zeros(rounded(part * shape[-1] ** -0.5, plain), layout) for part in parts]
    tensors = {name: torch.cat([group.tensors[name] for group in groups]) for name in groups[0].tensors}
    return WeightGroup(layout, tensors)


def with_zeros(group: WeightGroup, layout: Layout) -> WeightGroup:
    if "zeros" not in layout.others:
        return group
    zeros = torch.randint(-3, 4, group.tensors["scales"].shape, device="cuda", dtype=torch.int16)
    return WeightGroup(layout, group.tensors | {"zeros": zeros})


def made(layout: Layout, *shape: int) -> Weight:
    group = quantised(layout, *shape)
    parts = [group.map(lambda tensor, n=n: tensor[n : n + 8192]) for n in range(0, shape[0], 8192)]
    return Weight(torch.cat([dequantised(part).bfloat16() for part in parts]), pack_of(layout)(group), group)


def run(
    end: str,
    x: torch.Tensor,
    none: torch.Tensor,
    num: int,
    layout: Layout,
    tile: Tile | None,
    weight: torch.Tensor,
) -> torch.Tensor:
    """Our kernel over codes."""
    ours = e4m3 if layout.inputs else coded
    y = ours.linear(x, weight, none, num, layout, None, "argmax" if end == "head" else "", tile)
    return y[1] if end == "head" else y


def run_half(end: str, x: torch.Tensor, none: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return plain.best(x, weight, none)[1] if end == "head" else plain.fused(x, weight)


def candidates(num_rows: int, layout: Layout) -> list[Tile | None]:
    """Tiles that could serve so many rows; with inputs in e4m3 Triton's by single steps, and the table's."""
    most = next(most for most in SWEEP if num_rows <= most)
    tiles = [made_tile(*given) for given in SWEEP[most]]
    if num_rows <= 8 and not layout.inputs:
        tiles += [Tile(outputs, 8, 128, warps, ahead, True, group=group, direct=True)
                  for outputs, warps, ahead, group in FEW]  # fmt: skip
    if layout.inputs:
        tiles = [tile for tile in tiles if not (tile.abreast or tile.consumers)]
        tiles += [many.tile for many in table_of(90).steps]
    return [None, *tiles]


def made_tile(*given: int) -> Tile:
    *shape, abreast, consumers = given if len(given) == 7 else (*given, 0)
    return Tile(*shape, True, consumers > 0, abreast=abreast, consumers=consumers)


def measure(name: str, kind: str, rows: Iterable[int], bandwidth: float, sweep: bool) -> None:
    layout, (num_outputs, num_inputs) = KINDS[kind], shape_of(name)
    weight = made(layout, num_outputs, num_inputs)
    none = weight.half[0, :0]
    x = torch.randn(max(rows), num_inputs, device="cuda", dtype=torch.bfloat16)
    codes, halves = rotated(weight.packed), rotated(weight.half)
    some = slice(0, 4096)
    given = x[:64].double()
    if layout.inputs:
        codes_, scales = inputs.rounded(x[:64].cpu(), layout, torch.ones(()))
        scales = scales.repeat_interleave(inputs.SPAN if layout.inputs == "group" else num_inputs, 1)
        given = (codes_.double() * scales.double()).cuda()
    truth = (given @ dequantised(weight.group.map(lambda t: t[some])).double().t()).float()
    found = run("up", x[:64], none, num_outputs, layout, None, weight.packed)[:, some].float()
    error = ((found - truth).norm() / truth.norm()).item()
    for num in rows:
        if name == "head" and num > 256:
            continue
        turns = 3 if num > 512 else None
        call = partial(run, name, x[:num], none, num_outputs, layout)
        tiles = candidates(num, layout) if sweep else [None]
        theirs, half = contest(
            [partial(torch.mm, x[:num], w.t()) for w in halves[:turns]],
            [partial(run_half, name, x[:num], none, w) for w in halves[:turns]],
        )
        for tile in tiles:
            try:
                y = call(tile, weight.packed)
                ours, _ = contest(
                    [partial(call, tile, w) for w in codes[:turns]],
                    [partial(run_half, name, x[:num], none, w) for w in halves[:turns]],
                )
            except (TooLarge, RuntimeError) as problem:
                say(kind, name, num, type(problem).__name__, str(problem)[:60], tuple(tile or ()))
                continue
            places = (0, num // 2)
            lone = [
                run(name, x[at : at + 1], none, num_outputs, layout, None, weight.packed) for at in places
            ]
            same = all(torch.equal(y[at : at + 1], one) for at, one in zip((0, num // 2), lone, strict=True))
            work = 2 * num * num_outputs * num_inputs / ours / 1e12
            share = weight.packed.nbytes / ours / bandwidth
            say(kind, f"{name} {num_outputs}x{num_inputs}", num,
                f"{ours * 1e6:.1f}", f"{share:.0%}", f"{work:.0f}",
                f"{half * 1e6:.1f}", f"{theirs * 1e6:.1f}", f"{half / ours:.2f}", f"{error:.1e}", WORDS[same],
                (*tile[:5], tile.abreast, tile.consumers) if tile else "")  # fmt: skip


def measure_experts(kind: str, rows: Iterable[int], bandwidth: float, inner: int, sweep: bool) -> None:
    layout = KINDS[kind]
    run_moe = moe_of(layout)
    up, down = made(layout, EXPERTS, 2 * inner, WIDTH), made(layout, EXPERTS, WIDTH, inner)
    for num in rows:
        x = torch.randn(num, WIDTH, device="cuda", dtype=torch.bfloat16)
        turns = []
        for _ in range(8 if num < 1024 else 2):
            ids = torch.rand(num, EXPERTS, device="cuda").topk(SLOTS).indices.int()
            turns.append((x, ids, torch.rand(num, SLOTS, device="cuda")))
        rest = (up.packed, down.packed, "swiglu", inner, layout, layout)
        whole = run_moe(*turns[0], *rest)
        lone = run_moe(*(part[:1] for part in turns[0]), *rest)
        for tile in tiles_of_experts(num, layout, sweep):
            try:
                found = run_moe(*turns[0], *rest, tile=tile)
                ours, half = contest(
                    [partial(run_moe, *turn, *rest, tile=tile) for turn in turns],
                    [partial(plain_moe.moe, *turn, up.half, down.half, "swiglu") for turn in turns],
                )
            except (TooLarge, RuntimeError) as problem:
                say(kind, inner, num, type(problem).__name__, str(problem)[:60], tuple(tile or ()))
                continue
            chosen = sum(len(turn[1].unique()) for turn in turns) / len(turns)
            moved = chosen * (up.packed.nbytes + down.packed.nbytes) / EXPERTS
            same = torch.equal(found, whole) and torch.equal(whole[:1], lone)
            say(kind, inner, num, f"{chosen:.0f}", f"{ours * 1e6:.1f}", f"{moved / ours / bandwidth:.0%}",
                f"{half * 1e6:.1f}", f"{half / ours:.2f}", WORDS[same],
                (*tile[:5], tile.abreast) if tile else "")  # fmt: skip


def calls(kinds: Iterable[str], names: Iterable[str], modes: str, rows: Iterable[int]) -> set[Call]:
    """Kernels that will be launched, to be compiled by all cores before."""
    found: set[Call] = set()
    for layout, name in itertools.product(map(KINDS.get, kinds), names):
        outputs, width = shape_of(name)
        packed = pack_of(layout)(WeightGroup.empty(layout, (outputs, width)))
        half = torch.empty(outputs, width, dtype=torch.bfloat16, device="meta")
        for num in {*rows, 1}:
            x = torch.empty(num, width, dtype=torch.bfloat16, device="meta")
            tiles = candidates(num, layout) if "sweep" in modes and name != "head" else [None]
            for tile in tiles:
                found |= calls_at(run, H200, name, x, x[0, :0], outputs, layout, tile, packed)
            found |= calls_at(run_half, H200, name, x, x[0, :0], half)
    return found


def calls_of_experts(
    kinds: Iterable[str], inners: Iterable[int], modes: str, rows: Iterable[int]
) -> set[Call]:
    """The same of experts."""
    found: set[Call] = set()
    for layout, inner, num in itertools.product(map(KINDS.get, kinds), inners, {*rows, 1}):
        shapes = (EXPERTS, 2 * inner, WIDTH), (EXPERTS, WIDTH, inner)
        packed = [pack_of(layout)(WeightGroup.empty(layout, shape)) for shape in shapes]
        halves = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
        x = torch.empty(num, WIDTH, dtype=torch.bfloat16, device="meta")
        ids = torch.empty(num, SLOTS, dtype=torch.int32, device="meta")
        turn, rest = (x, ids, ids.float()), (*packed, "swiglu", inner, layout, layout)
        for tile in tiles_of_experts(num, layout, "tiles" in modes):
            found |= calls_at(moe_of(layout), H200, *turn, *rest, tile=tile)
        found |= calls_at(plain_moe.moe, H200, *turn, *halves, "swiglu")
    return found


def tiles_of_experts(num_rows: int, layout: Layout, sweep: bool) -> list[Tile | None]:
    most = next(most for most in OF_EXPERTS if num_rows <= most)
    tiles = [made_tile(*given) for given in OF_EXPERTS[most] if sweep]
    return [None, *(tile for tile in tiles if not (layout.inputs and (tile.abreast or tile.inner > 128)))]


def compiled(call: Call) -> None:
    """Into Triton's cache on disk."""
    with suppress(TooLarge):
        compile_call(call, 90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("modes", nargs="?", default="table,experts")
    parser.add_argument("--kinds", default="fp8,fp8row,int4,int4z,nvfp4")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--inner", default=str(INNER), help="widths of experts")
    parser.add_argument("--compile", action="store_true", help="compile, and no more")
    asked = parser.parse_args()
    if not (asked.compile or torch.cuda.is_available()):
        sys.exit("gpu_quantised.py: torch finds no CUDA device here; --compile needs none")
    kinds, rows = asked.kinds.split(","), [int(num) for num in asked.rows.split(",")]
    names, inners = asked.shapes.split(","), [int(inner) for inner in asked.inner.split(",")]
    modes, wanted = {*asked.modes.split(",")}, set[Call]()
    if modes & {"table", "sweep"}:
        wanted |= calls(kinds, names, asked.modes, rows)
    if modes & {"experts", "tiles"}:
        wanted |= calls_of_experts(kinds, inners, asked.modes, rows)
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(compiled, sorted(wanted, key=repr), chunksize=1)
    if asked.compile:
        return
    on_demand()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, a copy moves {bandwidth / 1e12:.2f} TB/s"
    )
    columns = ("kind", "layer", "rows", "us", "of bandwidth", "TFLOP/s", "our bf16, us", "cuBLAS, us", "gain",
               "error", "bits", "tile")  # fmt: skip
    for mode in asked.modes.split(","):
        if mode in ("experts", "tiles"):
            begin(
                "kind",
                "inner",
                "rows",
                "chosen",
                "us",
                "of bandwidth",
                "our bf16, us",
                "gain",
                "bits",
                "tile",
            )
            for kind, inner in itertools.product(kinds, inners):
                measure_experts(kind, rows, bandwidth, inner, mode == "tiles")
            continue
        begin(*columns)
        for kind, name in itertools.product(kinds, names):
            measure(name, kind, rows, bandwidth, mode == "sweep")


if __name__ == "__main__":
    main()
