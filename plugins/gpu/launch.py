"""How launchers call kernels. No Triton here: an engine runs without a compiler.

A kernel is compiled for the kinds of its arguments and for its constants: a `Call`. Binaries are made when an
engine is built (plugins/gpu/compile.py), for all calls that it can come to make (plugins/gpu/cover.py).
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch

CLEAR_TOKENS = 16  # tokens whose row one program looks for
ALIGNMENT = 16  # bytes of an address, and what an int may be a multiple of: a kernel is told
WORDS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
ONE = "1"  # the kind of an int that is 1, which a kernel is told, too
ANY = "?"  # ends the kind of what a kernel is told nothing of

Constant = bool | int | str
Values = Sequence[Any]  # tensors, blocks, ints and floats, as a kernel takes them


def pow2(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def cdiv(size: int, part: int) -> int:
    """How many parts cover the size."""
    return -(-size // part)


class Block(NamedTuple):
    """A tensor that a kernel reads or writes in boxes, through a descriptor (TMA)."""

    tensor: torch.Tensor
    box: tuple[int, ...]


class NotCompiled(RuntimeError):
    """A kernel was called in a way for which there is no binary; the message is one line."""


@dataclass(frozen=True)
class Call:
    """What a kernel is compiled for."""

    kernel: str  # delta._scan
    kinds: tuple[str, ...]  # of its arguments
    constants: tuple[tuple[str, Constant], ...]  # by name; num_warps and the like among them

    def fits(self, values: Values, constants: Mapping[str, Any]) -> bool:
        same = self.constants == constants_of(constants) and len(self.kinds) == len(values)
        return same and all(
            kind == kind_of(value, kind.endswith(ANY)) for kind, value in zip(self.kinds, values, strict=True)
        )


def kind_of(value: Any, varies: bool = False) -> str:
    """`*bf16:16` or `*bf16`, `*i32?`, `i32:16`, `i32` or `1`, `fp32`, `<bf16 64 128>`.

    varies: the kernel is told neither address nor value; nor where rows, positions and ids start, ever
    (words of int16 are weights).
    """
    if isinstance(value, torch.Tensor):
        told = (
            ANY
            if varies or not (value.is_floating_point() or value.dtype is torch.int16)
            else ""
            if value.data_ptr() % ALIGNMENT
            else f":{ALIGNMENT}"
        )
        return f"*{WORDS[value.dtype]}{told}"
    if isinstance(value, Block):
        return f"<{WORDS[value.tensor.dtype]} {' '.join(map(str, value.box))}>"
    if isinstance(value, float):
        return "fp32"
    if varies:
        return f"i32{ANY}"
    word = "i64" if value >> 31 > 0 else "i32"
    return ONE if value == 1 else f"{word}:{ALIGNMENT}" if value % ALIGNMENT == 0 else word


def constants_of(constants: Mapping[str, Any]) -> tuple[tuple[str, Constant], ...]:
    """Sorted, dtypes as words."""
    return tuple(
        (name, WORDS[value] if isinstance(value, torch.dtype) else value)
        for name, value in sorted(constants.items())
    )


Launch = Callable[[tuple[int, ...], list[Any]], None]  # tensors as addresses
Instead = Callable[["Kernel", tuple[int, ...], Values, Mapping[str, Any]], None]
_instead: Instead | None = None
_SHARING = Lock()
_left: "deque[tuple[Kernel, Call]]" = deque()  # by engines that are gone


@contextmanager
def launches(instead: Instead) -> Iterator[None]:
    """Inside, all launches are handed to this function: to be interpreted, or looked at."""
    global _instead
    before, _instead = _instead, instead
    try:
        yield
    finally:
        _instead = before


class Kernel:
    """An entry point of `plugins/<op>/triton.py`, or of `gluon*.py` there; called as `kernel[grid](*values,
    CONSTANT=...)`."""

    # makes what no engine has brought, where somebody asked for that (plugins/gpu/compile.py, on_demand)
    compile: Callable[["Kernel", Values, Mapping[str, Any]], None] | None = None

    def __init__(self, op: str, name: str) -> None:
        self.op, self.entry, self.name = op, name, f"{op}.{name}"
        self.binaries: dict[Call, Launch] = {}
        self._found: dict[tuple[Any, ...], Launch] = {}
        self._users: Counter[Call] = Counter()  # engines that are open

    def take(self, call: Call, load: Callable[[], Launch]) -> None:
        """An engine has this binary; what another one has loaded is not loaded again."""
        try:
            with _SHARING:
                if call not in self.binaries:  # a new dict, for somebody may look through the old one
                    self.binaries = {**self.binaries, call: load()}
                self._users[call] += 1
        finally:
            _unload()

    def leave(self, call: Call) -> None:
        """The engine is gone; the last one takes the binary along. Never waits for who is loading: Python's
        collector may have found the engine there, and then that waits for this."""
        _left.append((self, call))
        _unload()

    def _drop(self, call: Call) -> None:
        self._users[call] -= 1
        if not self._users[call]:
            self.binaries = {other: launch for other, launch in self.binaries.items() if other != call}
            self._found = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *values: Any, **constants: Any) -> None:
        if _instead is not None:
            _instead(self, grid, values, constants)
            return
        look = [*constants, *constants.values()]  # all that decides of kinds
        flat, addresses = [], 0
        for value in values:
            kind = type(value)
            if kind is int:
                look.append(ONE if value == 1 else value % ALIGNMENT == 0)
                flat.append(value)
            elif kind is Block:
                look += (value.tensor.dtype, value.box)
                flat.append(value)
            elif kind is float:
                flat.append(value)
            else:
                address = value.data_ptr()
                addresses |= address
                look.append(value.dtype)
                flat.append(address)
        if addresses % ALIGNMENT:  # rarely: somebody starts elsewhere
            look += [value.data_ptr() % ALIGNMENT == 0 for value in values if isinstance(value, torch.Tensor)]
        key = tuple(look)
        launch = self._found.get(key)
        if launch is None:
            launch = self._found[key] = self._find(values, constants)
        launch(grid, flat)

    def _find(self, values: Values, constants: Mapping[str, Any]) -> Launch:
        """The binary for such a call; raises NotCompiled where there is none."""
        for _ in range(2):
            for call, launch in self.binaries.items():
                if call.fits(values, constants):
                    return launch
            if Kernel.compile is None:
                break
            Kernel.compile(self, values, constants)
        wanted = ", ".join(f"{name}={value}" for name, value in constants_of(constants))
        raise NotCompiled(
            f"there is no binary of {self.name} for ({', '.join(map(kind_of, values))}; {wanted}) among the"
            f" {len(self.binaries)} loaded; run build-engine again, or without an engine call"
            f" hemiola.plugins.gpu.compile.on_demand()"
        )


def _unload() -> None:
    """What engines have left; if somebody shares now, he does it behind that."""
    while _left and _SHARING.acquire(blocking=False):
        try:
            while _left:
                kernel, call = _left.popleft()
                kernel._drop(call)
        finally:
            _SHARING.release()
