"""Compiled forms at sizes on both sides of every constant in their code, between red zones (conftest.py)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from kit.ops import Subject, check, int32, same_bits, subject

from hemiola.plugins import OPS
from hemiola.plugins.cpu import moves
from hemiola.plugins.cpu.moves import BLOCK
from hemiola.plugins.cpu.simd import LANES
from hemiola.plugins.cpu.tiles import ABREAST, DEPTH, HEIGHT, STRIP
from hemiola.plugins.embed.compiled import BLOCK as EMBED_BLOCK
from hemiola.plugins.linear.compiled import BLOCK as LINEAR_BLOCK
from hemiola.plugins.linear.compiled import UNIT


def around(size: int) -> list[int]:
    return [size - 1, size, size + 1, 2 * size + 1]


def calls() -> Iterator[tuple[Subject, int, int]]:
    """Sizes of an op, tokens, rows."""
    for size in around(BLOCK):
        yield subject("gate", "silu", E=LANES, J=LANES), size, 2
        yield subject("norm", 1e-2, LANES, False, W=2 * LANES), size, 2
        yield subject("rope", H=2, D=2 * size + 3, M=50, R=size), size, 2
        yield subject("route", "softmax", 3, 1, 1, False, 1.0, E=size), size, 2
        yield subject("route", "sigmoid", 3, 1, 1, True, 2.0, E=size, absent="bias"), size, 2
        yield subject("conv", E=LANES, W=3), size, 2
        yield subject("delta", G=1, K=16, H=size, V=16, J=1), size, 2
        yield subject("delta", G=1, K=32, H=1, V=size // 2 * 32, J=32), 5, 2
        yield subject("mamba2", 0.0, 1.0, H=size, P=16, G=1, D=16), size, 2
        yield subject("moe", "relu2", F=size, K=2, E=3, J=size, I=size), size, 2
        yield subject("moe", "swiglu", F=size, K=1, E=3, J=2 * size, I=size), size, 2
    for size in around(EMBED_BLOCK):
        yield subject("embed", V=3 * STRIP + 1, F=size), size, 2
    for width in (1, 2, 5, LANES + 1):  # of a convolution, also wider than a chunk
        yield subject("conv", E=48, W=width), 40, 2
    for experts in (127, 128, 129, 257, 600):
        yield subject("route", "softmax", 8, 1, 1, True, 1.0, E=experts), 5, 2
        yield subject("route", "sigmoid", 6, 1, 1, True, 1.0, E=experts), 5, 2
        yield subject("moe", "swiglu", F=16, K=8, E=experts, J=32, I=16), 70, 2
    yield subject("route", "sigmoid", 9, 43, 11, True, 1.0, E=129), 20, 2
    for size in {*around(HEIGHT), *around(len(ABREAST)), *around(LINEAR_BLOCK)}:
        yield subject("linear", F=48, O=UNIT * STRIP + 1), size, 2
        yield subject("linear", F=33, O=STRIP - 1, absent="bias"), size, 2
    for size in (*around(STRIP), *around(UNIT * STRIP)):
        yield subject("linear", F=48, O=size), 3, 2
    for size in around(DEPTH):
        yield subject("linear", F=size, O=70), LINEAR_BLOCK + 1, 2
    for rows in (63, 64, 65, 130):
        yield subject("conv", E=16, W=4), rows + 40, rows
        yield subject("delta", G=1, K=16, H=2, V=64, J=1), rows + 40, rows
        yield subject("mamba2", 0.0, 1.0, H=2, P=16, G=1, D=64), rows + 40, rows
    for depth in (48, 64, 80, 144):  # WIDE is 64
        yield subject("mamba2", 0.0, 1.0, H=2, P=depth, G=1, D=depth), 20, 2
        yield subject("delta", G=1, K=depth, H=2, V=depth, J=1), 20, 2


def test_the_table_knows_all_blocks() -> None:
    """An op whose items have another number of tokens needs sizes of its own."""
    names = [op.name for op in OPS.values() if op.forms[0].device == "cpu"]
    modules = [import_module(f"hemiola.plugins.{name}.compiled") for name in names]
    blocks = {getattr(module, "BLOCK", module.__dict__.get("LINES", BLOCK)) for module in modules}
    assert blocks == {BLOCK, EMBED_BLOCK, LINEAR_BLOCK} and BLOCK == LANES


@pytest.mark.parametrize(
    "subject,num_tokens,num_rows", [pytest.param(*call, id="-".join(map(str, call))) for call in calls()]
)
def test_a_size_beside_a_constant_is_the_reference(subject: Subject, num_tokens: int, num_rows: int) -> None:
    check(subject, subject.arguments(num_tokens, num_rows=num_rows))


LAYER = subject("moe", "relu2", F=24, K=1, E=3, J=40, I=40)


@pytest.mark.parametrize("size", around(LINEAR_BLOCK))
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_experts_with_more_lines_than_a_block(size: int, taken: int) -> None:
    """So many for each of the experts taken; the table of blocks has no line to spare, if all are."""
    arguments = LAYER.arguments(size * taken)
    ids = torch.arange(size * taken) % taken
    arguments[1] = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].int()[:, None]
    check(LAYER, arguments)


def test_experts_of_any_number_of_lines() -> None:
    """Random shares of many tokens: some experts have none, some one line, some several blocks."""
    layer = replace(LAYER, sizes=tuple((dict(LAYER.sizes) | {"K": 4, "E": 9}).items()))
    rng = torch.Generator().manual_seed(0)
    for seed in range(4):
        arguments = layer.arguments(700, seed)
        wish = torch.rand(700, 9, generator=rng) * torch.rand(9, generator=rng) ** 3
        arguments[1] = wish.argsort(1, descending=True)[:, :4].int()
        check(layer, arguments)


@pytest.mark.parametrize("num_tokens", around(moves.BLOCK))
@pytest.mark.parametrize("width", around(LANES))
def test_torchs_functions_at_every_size(num_tokens: int, width: int) -> None:
    a, b = torch.randn(2, num_tokens, width)
    assert same_bits(moves.combine(moves.SUM, a, b), a + b)
    assert same_bits(moves.combine(moves.PRODUCT, a, b), a * b)
    assert torch.equal(moves.combine(moves.RELU, a, a), a.relu())
    assert torch.equal(moves.combine(moves.SQUARED_RELU, a, a), a.relu() ** 2)
    assert same_bits(moves.concatenate([a, b[:, :3], a]), torch.cat((a, b[:, :3], a), 1))
    ids = int32(*reversed(range(num_tokens)), 0)
    assert same_bits(moves.gather(a, ids), a[ids.long()])


def test_no_form_reads_outside_of_its_memory() -> None:
    """In a process of its own, which the first such read ends; its last line is the call."""
    tests = Path(__file__).parent.parent
    folders = os.pathsep.join(map(str, (tests.parent, tests, tests / "plugins")))
    command = [sys.executable, str(tests / "kit" / "guard_pages.py")]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": folders}, capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stdout.splitlines()[-1:]} {ended.stderr}"
