"""How a page holds keys and values, and what it takes of a token.

A page holds plain numbers [L, G, D], or codes of 3 or 4 bits (TurboQuant, with vLLM's names and tables). The
codes of its L tokens and G heads come first, [L, G, D * bits / 8] bytes, then fp16 numbers that give them a
size, [L, G, 1] of keys or [L, G, 2] of values. So a page of codes has L * G * width bytes, and both
parts start at multiples of 16 bytes. What is stored is a function of one token's key or value:

    key    y = H k / (|k| + 1e-8), H Sylvester's Hadamard matrix; a number's code counts the borders that are
           not above it; beside the codes |k| / |c| for the centres c that they stand for
    value  steps above the least number, the step (high - low) / (2^bits - 1); beside them step and least

vLLM keeps |k| and divides by |c| whenever it reads a key: the same number but for its rounding to fp16.
"""

import struct
from itertools import pairwise
from typing import NamedTuple

import torch

from hemiola.plugins.groups import E4M3

NOTES = {"key": 1, "value": 2}  # fp16 numbers beside the codes of a token and head
NOTE_BYTES = 2
CODES = torch.uint8  # dtype of pages of codes

# The positive half of what codes of keys stand for: Lloyd-Max centres of a normal number, where vLLM's solver
# stops. The numbers of a rotated key are nearly normal.
CENTRES = {
    3: (0.244983593, 0.755645499, 1.343180002, 2.150349539),
    4: (
        0.128427661, 0.388137791, 0.656879919, 0.942448243, 1.25625757, 1.61788176, 2.068447119,
        2.730922219,
    ),
}  # fmt: skip
TINY = 1e-8  # the least step, and what keeps a norm of 0 from dividing


class PageFormat(NamedTuple):
    """What pages hold: bits of a key's and of a value's numbers, 0 for the engine's own."""

    key_bits: int
    value_bits: int

    def dtypes(self, own: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        kinds = {0: own, 8: E4M3}
        return kinds.get(self.key_bits, CODES), kinds.get(self.value_bits, CODES)

    def widths(self, depth: int) -> tuple[int, int]:
        """What a token takes for each head, in numbers of those dtypes."""
        return width_of("key", self.key_bits, depth), width_of("value", self.value_bits, depth)

    @property
    def loses_much(self) -> bool:
        """Codes of 3 bits: vLLM's study has some 20 points less in tests of reasoning."""
        return 3 in self


FORMATS = {  # by the name of --kv-dtype; vLLM's names
    "auto": PageFormat(0, 0),
    "fp8": PageFormat(8, 8),
    "turboquant_k8v4": PageFormat(8, 4),
    "turboquant_4bit_nc": PageFormat(4, 4),
    "turboquant_k3v4_nc": PageFormat(3, 4),
    "turboquant_3bit_nc": PageFormat(3, 3),
}


def width_of(part: str, bits: int, depth: int) -> int:
    """Of one token and head: bytes of codes and notes, or plain numbers."""
    return depth if bits in (0, 8) else code_bytes(bits, depth) + NOTES[part] * NOTE_BYTES


def code_bytes(bits: int, depth: int) -> int:
    return depth * bits // 8


def bits_of(part: str, dtype: torch.dtype, width: int, depth: int) -> int:
    """Bits of the codes in such pages; 0 for plain numbers, 8 for e4m3. Raises ValueError for others."""
    found = 0 if dtype is not CODES else next((b for b in CENTRES if width == width_of(part, b, depth)), None)
    if found is None or (dtype is not CODES and width != depth):
        raise ValueError(f"{part}s of {depth} numbers do not take {width} of {dtype} in a page")
    return 8 if dtype is E4M3 else found


def refuses_codes(part: str, bits: int, depth: int) -> str:
    """Why heads of this size have no such codes, or ""."""
    if bits not in CENTRES:
        return ""
    if part == "key" and depth & (depth - 1):
        return f"heads have {depth} numbers; keys of {bits} bits are rotated by a power of two"
    return f"heads have {depth} numbers, no multiple of 16" if depth % 16 else ""


def centres(bits: int) -> tuple[float, ...]:
    """What the codes 0, 1, .. of a key stand for, rising; fp32."""
    half = tuple(_fp32(centre) for centre in CENTRES[bits])
    return (*(-centre for centre in reversed(half)), *half)


def borders(bits: int) -> tuple[float, ...]:
    """A number's code is how many of these are not above it; fp32."""
    return tuple(_fp32((low + high) / 2) for low, high in pairwise(centres(bits)))


def _fp32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]
