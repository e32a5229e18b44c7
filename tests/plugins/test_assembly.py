"""No inner loop of a kernel keeps vectors on the stack: tiles fit into the registers that they are for."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hemiola.plugins.cpu import simd
from hemiola.plugins.cpu.registers import REGISTERS, Registers, registers_of

X86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="forces features of x86 CPUs")
PLUGINS = Path(simd.__file__).parent.parent
KERNELS = sorted(f"{path.parent.name}.compiled" for path in PLUGINS.glob("*/compiled.py"))
AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}
AVX512 = {"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": "+avx512f,+avx512dq,+avx512bw,+avx512vl"}
AVX512["NUMBA_CPU_FEATURES"] += ",+avx2,+fma"


def spilled(modules: list[str], environment: dict[str, str], *rest: str) -> tuple[list[str], int]:
    """See tests/kit/assembly.py. Code is compiled only: it may be for another CPU."""
    command = [sys.executable, "-m", "tests.kit.assembly", ",".join(modules), *rest]
    root = str(Path(__file__).parent.parent.parent)
    environment = os.environ | {"PYTHONPATH": root} | environment
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    *loops, num_loops = done.stdout.splitlines()
    return loops, int(num_loops)


def but_codes(loops: list[str]) -> list[str]:
    """Registers of 8 or 4 lanes are too few for the scales of a strip: each input reads them again.

    And for all the constants with which numbers become narrow ones of pages, and back: some are read from the
    stack for every 16 numbers. That is a read from the first cache, as of any constant that has no register;
    nothing is written there in these loops, and the tiles of attention keep nothing there.
    """
    return [loop for loop in loops if "6linear5codes" not in loop and not reads_a_constant_of_pages(loop)]


def reads_a_constant_of_pages(loop: str) -> bool:
    is_of_pages = any(name in loop for name in ("9attention8compiled6_write", "9attention5spans5widen"))
    return is_of_pages and " 0 of them written," in loop


@X86
@pytest.mark.parametrize("registers", [Registers(32, 16), Registers(16, 8)], ids=["avx512", "avx2"])
def test_nothing_is_spilled(registers: Registers) -> None:
    wanted = {Registers(32, 16): AVX512, Registers(16, 8): AVX2}[registers]
    loops, num_loops = spilled([*KERNELS, "cpu.moves"], {} if registers == REGISTERS else wanted)
    assert not (loops if registers.number == 32 else but_codes(loops)) and num_loops > 60


@X86
def test_nothing_is_spilled_on_neon(tmp_path: Path) -> None:
    """What LLVM makes for AArch64 of the tiles for its registers; no such machine has run it."""
    modules = ["linear.compiled", "delta.compiled", "attention.compiled"]
    loops, num_loops = spilled(modules, AVX2 | {"XDG_CACHE_HOME": str(tmp_path)}, "32x4", "aarch64-linux-gnu")
    assert not but_codes(loops) and num_loops > 30


@X86
def test_tiles_for_more_registers_than_there_are_are_seen(tmp_path: Path) -> None:
    own = AVX2 | {"XDG_CACHE_HOME": str(tmp_path)}
    loops, _ = spilled(["linear.compiled"], own, "24x8", "", "multiply")
    assert any("tiles" in loop for loop in loops)


@pytest.mark.parametrize(
    "triple,features,expected",
    [
        ("x86_64-unknown-linux-gnu", "+avx,+avx2,+avx512f", Registers(32, 16)),
        ("x86_64-unknown-linux-gnu", "+avx,+avx2,-avx512f", Registers(16, 8)),
        ("x86_64-unknown-linux-gnu", "+sse2,-avx", Registers(16, 4)),
        ("aarch64-unknown-linux-gnu", "+neon", Registers(32, 4)),
        ("arm64-apple-darwin", "", Registers(32, 4)),
    ],
)
def test_registers_of_a_cpu(triple: str, features: str, expected: Registers) -> None:
    assert registers_of(triple, features) == expected
