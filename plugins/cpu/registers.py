"""What this CPU's code is made for, and how many numbers its vector registers hold."""

from typing import Any, NamedTuple

from numba.core.registry import cpu_target

_target: Any = cpu_target.target_context
CPU: tuple[str, str, str] = _target.codegen().magic_tuple()  # triple, name and features
LANES = 16  # of the vectors in which kernels are written: simd.py


class Registers(NamedTuple):
    number: int
    lanes: int  # fp32 numbers in each

    @property
    def parts(self) -> int:
        """Registers that a vector takes."""
        return LANES // self.lanes

    @property
    def vectors(self) -> int:
        """Vectors that fit in."""
        return self.number // self.parts


def registers_of(triple: str, features: str) -> Registers:
    if triple.startswith(("aarch64", "arm64")):
        return Registers(32, 4)
    if "+avx512f" in features:
        return Registers(32, 16)
    return Registers(16, 8) if "+avx" in features else Registers(16, 4)


REGISTERS = registers_of(CPU[0], CPU[2])
