"""Instructions that widen codes, carried out one by one: Triton's interpreter knows none of them."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hemiola.plugins.gpu.codes import instructions
from hemiola.plugins.gpu.words import spread
from hemiola.plugins.groups import E2M1, E4M3

SIGNED = [*E2M1, *(-x for x in E2M1)]


def bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Of bf16 in both halves of a register; the sums here are exact in float64."""
    halves = []
    for shift in (0, 16):
        x, y, z = (bf16((each >> shift) & 0xFFFF) for each in (a, b, c))
        whole = torch.from_numpy(x * y + z).bfloat16()
        assert (whole.double().numpy() == x * y + z).all(), "a code is rounded"
        halves.append(whole.view(torch.int16).numpy().astype(np.uint16).astype(np.uint64))
    return halves[0] | halves[1] << 16


def carried_out(text: str, words: np.ndarray) -> np.ndarray:
    """The register that it makes of these."""
    known = {"$1": words}

    def value(name: str) -> np.ndarray:
        return known[name] if name in known else np.full_like(words, int(name, 0))

    for line in text.strip("{} ").split(";"):
        op, *names = re.split(r",?\s+", line.strip())
        if op in ("", ".reg"):
            continue
        table = names.pop() if op == "lop3.b32" else ""
        given = [value(name) for name in names[1:]]
        match op:
            case "mov.b32":
                made = given[0]
            case "shl.b32":
                made = given[0] << given[1]
            case "shr.b32":
                made = given[0] >> given[1]
            case "and.b32":
                made = given[0] & given[1]
            case "xor.b32":
                made = given[0] ^ given[1]
            case "lop3.b32":
                assert table == "0xea"
                made = given[0] & given[1] | given[2]
            case "fma.rn.bf16x2":
                made = fma(*given)
            case _:
                raise AssertionError(op)
        known[names[0]] = made & 0xFFFFFFFF
    return known["$0"]


def in_word(name: str, codes: np.ndarray, bits: int, part: int) -> np.ndarray:
    """Codes where a word of 16 bits has its code number `part`."""
    if name != "e2m1":
        return codes.astype(np.uint64) << np.uint64(bits * part)
    parts = torch.zeros(4, len(codes), dtype=torch.int32)
    parts[part] = torch.from_numpy(codes.astype(np.int32))
    return spread(parts)[part].numpy().astype(np.uint64)


@pytest.mark.parametrize("name", ["e4m3", "int8", "int4", "int4 and 136", "e2m1"])
def test_every_code_at_every_place_becomes_its_number(name: str) -> None:
    bits = 8 if name in ("e4m3", "int8") else 4
    codes = np.arange(1 << bits, dtype=np.uint64)
    codes = codes[codes % 128 != 127] if name == "e4m3" else codes
    wanted = {
        "e4m3": lambda: torch.from_numpy(codes.astype(np.uint8)).view(E4M3).double().numpy(),
        "int8": lambda: codes.astype(np.uint8).view(np.int8).astype(np.float64),
        "int4": lambda: codes.astype(np.float64) - 8,
        "int4 and 136": lambda: codes.astype(np.float64) + 128,
        "e2m1": lambda: np.array(SIGNED) * 2.0**-126,
    }[name]()
    rng = np.random.default_rng(0)
    for part in range(16 // bits):
        placed, mask = (
            in_word(name, codes, bits, part),
            in_word(name, np.array([(1 << bits) - 1]), bits, part)[0],
        )
        for half in (0, 16):
            noise = rng.integers(0, 1 << 32, len(codes), dtype=np.uint64)
            if name == "e4m3":  # no NaN beside it
                noise &= np.uint64(0xBFBFBFBF)
            words = noise & np.uint64(~(int(mask) << half) & 0xFFFFFFFF) | placed << np.uint64(half)
            text = getattr(found := instructions(name, part), "value", found)
            made = bf16((carried_out(text, words) >> np.uint64(half)) & np.uint64(0xFFFF))
            assert (made == wanted).all(), (part, half)
