"""What every compiled form keeps: the numbers of its reference, and bits that depend on nothing else."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from kit.ops import ALL, Subject, Tensors, check, run, same_bits

from hemiola.plugins.cpu import kernel
from hemiola.plugins.cpu.cache import cache_dir
from hemiola.plugins.linear.compiled import BLOCK
from hemiola.plugins.norm.compiled import _norm

LONG = dict.fromkeys(("linear", "moe"), 2 * BLOCK + 7)  # tokens of several items of work
READY = [subject for subject in ALL if subject.op.forms[0].name == "compiled"]
COMPILED = pytest.mark.parametrize("subject", READY, ids=str)
STATELESS = pytest.mark.parametrize(
    "subject", [s for s in READY if all(arg.name != "rows" for arg in s.op.args)], ids=str
)


def per_token(subject: Subject) -> list[int]:
    op = subject.op
    args = dict(enumerate(op.args))
    if subject.option:
        args |= dict(enumerate(op.options, len(op.args) + len(op.attrs)))
    return [index for index, arg in args.items() if arg.shape[0] == "T" and arg.name != subject.absent]


@pytest.mark.parametrize("num_tokens", [2, 17, 40])
@COMPILED
@pytest.mark.usefixtures("poisoned_empty")
def test_it_is_the_reference(subject: Subject, num_tokens: int) -> None:
    """In fp64; and it changes nothing but states."""
    arguments = subject.arguments(num_tokens)
    before = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
    check(subject, arguments)
    for now, then in zip(arguments, before, strict=True):
        assert now == then if not isinstance(now, torch.Tensor) else same_bits(now, then)


@COMPILED
def test_no_tokens(subject: Subject) -> None:
    arguments = subject.arguments(0)
    ours, theirs = run(subject, arguments), run(subject, arguments, "reference")
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.shape == wanted.shape and mine.dtype == wanted.dtype
        assert same_bits(mine, wanted)
        assert not mine.is_floating_point() or mine.numel() == 0 or mine.isnan().all()


@COMPILED
def test_where_tokens_lie_changes_no_bit(subject: Subject) -> None:
    """A layer cuts its inputs out of one projection, whose other columns are nobody's."""
    arguments = subject.arguments(LONG.get(subject.name, 21))
    expected = run(subject, arguments)

    def columns(x: torch.Tensor) -> torch.Tensor:
        edge = x.new_full((len(x), 3), -(10**9) if x.dtype == torch.int32 else torch.nan)
        return torch.cat([edge, x.flatten(1), edge], dim=1)[:, 3:-3].unflatten(1, x.shape[1:])

    def crossed(x: torch.Tensor) -> torch.Tensor:
        return x.mT.contiguous().mT

    def every_second(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(2, 0)[::2]

    for way in (columns, crossed, every_second):
        moved = list(arguments)
        for index in per_token(subject):
            if way is every_second or arguments[index].dim() > 1:
                moved[index] = way(arguments[index])
                assert torch.equal(moved[index], arguments[index])
        assert all(same_bits(a, b) for a, b in zip(run(subject, moved), expected, strict=True)), way.__name__


@COMPILED
def test_threads_change_no_bit(subject: Subject, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = subject.arguments(LONG.get(subject.name, 150))
    torch.set_num_threads(1)
    expected = run(subject, arguments)
    torch.set_num_threads(threads)
    monkeypatch.setattr(kernel, "WORTH_A_THREAD", -1)
    assert all(same_bits(a, b) for a, b in zip(run(subject, arguments), expected, strict=True))


@STATELESS
def test_neighbours_and_places_change_no_bit(subject: Subject) -> None:
    """One token alone, among others, at another place, beside NaN."""
    num = LONG.get(subject.name, 70)
    arguments = subject.arguments(num)
    expected = run(subject, arguments)

    def check_part(chosen: torch.Tensor) -> None:
        part = list(arguments)
        for index in per_token(subject):
            part[index] = arguments[index][chosen]
        for mine, wanted in zip(run(subject, part), expected, strict=True):
            assert same_bits(mine, wanted[chosen]), f"{len(chosen)} tokens from {chosen[0]} on"

    for count in (1, 2, 3, 4, 5, 15, 16, 17, 33, num // 2):
        for start in {0, 5, 33, num - count}:
            check_part(torch.arange(start, start + count))
    check_part(torch.randperm(num, generator=torch.Generator().manual_seed(1)))
    for token in (0, 16, num - 1):
        poisoned = list(arguments)
        for index in per_token(subject):
            if arguments[index].is_floating_point():
                poisoned[index] = torch.full_like(arguments[index], torch.nan)
                poisoned[index][token] = arguments[index][token]
        for mine, wanted in zip(run(subject, poisoned), expected, strict=True):
            assert same_bits(mine[token], wanted[token])
            others = torch.arange(num) != token
            if subject.name != "embed" and mine.is_floating_point():
                assert mine[others].isnan().all()


def save(path: str) -> None:
    """What another process is asked for: every result, and the code of a kernel."""
    torch.save((everything(), assembly(), str(cache_dir())), path)


def everything() -> dict[str, Tensors]:
    """Results of all forms; narrow registers take other tiles for the same numbers of tokens."""
    calls = [(subject, num) for subject in READY for num in (2, 5, 8, 13, 40)]
    return {f"{subject}, {num} tokens": run(subject, subject.arguments(num)) for subject, num in calls}


def assembly() -> str:
    """Code that was loaded cannot be read, so one kernel is compiled again."""
    signature = numba.types.void(*[numba.types.int64] * len(_norm.arguments))
    code: Any = numba.cfunc(signature, error_model="numpy")(_norm._function)
    return code._library.get_asm_str()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names registers of x86-64")
def test_the_width_of_registers_changes_no_bit(tmp_path: Path) -> None:
    """A process whose kernels are compiled for AVX2 alone, beside this one; its kernels lie elsewhere."""
    path, tests = tmp_path / "results.pt", Path(__file__).parent.parent
    folders = os.pathsep.join(map(str, (tests.parent, tests, tests / "plugins")))
    narrow = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma", "PYTHONPATH": folders}
    script = f"import test_forms; test_forms.save({str(path)!r})"
    subprocess.run([sys.executable, "-c", script], env=os.environ | narrow, check=True)
    theirs, code, folder = torch.load(path)
    assert "zmm" not in code and "ymm" in code and "vfmadd" in code
    print("registers of 512 bits here:", "zmm" in assembly())
    assert folder != str(cache_dir())
    for name, ours in everything().items():
        assert all(same_bits(a, b) for a, b in zip(ours, theirs[name], strict=True)), name
