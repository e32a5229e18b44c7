"""What a compiled kernel does before it waits for the kernels before it."""

import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # it needs Triton
    from hemiola.plugins.gpu.compile import Compiled

# in PTX and in what the assembler made of it: instructions that must not stand before the one that waits
WAITS = ("griddepcontrol.wait;", "ACQBULK")
NEVER_BEFORE = (
    r"\b(?:ld(?!\.param|\.shared)|st(?!\.shared)|atom|red|cp|bra|ret|exit|trap)\b[^;]*;",
    r"\b(?:LD|LDG|LDGSTS|ST|STG|ATOMG?|REDG?|UTMALDG|UTMASTG|UTMAREDG|UBLKCP|EXIT|RET)\b[^;]*;",
)


def too_early(*made: "Compiled") -> list[str]:
    """Of kernels for one architecture: what they must not do before they wait for others, and what those
    have of this that should not wait."""
    found = []
    for one in made:
        entry = one.ptx[one.ptx.index("{", one.ptx.index(".visible .entry")) :]
        if one.binary.waits:
            found += _before(0, entry, one)
        else:
            found += re.findall(r"^.*(?:griddepcontrol|// early).*$", entry, re.M)
    waiting = [one for one in made if one.binary.waits]
    for one, code in zip(waiting, _disassembled(waiting), strict=False):
        found += _before(1, code, one)
    return found


def _before(language: int, code: str, one: "Compiled") -> list[str]:
    wait = WAITS[language]
    before, is_there, _ = code.partition(wait)
    wrong = re.findall(NEVER_BEFORE[language], before) if is_there else [f"no {wait}"]
    return [f"{one.binary.call}: {what}" for what in wrong]


def _disassembled(made: Sequence["Compiled"]) -> list[str]:
    """All at once, for the tool takes a quarter of a second to begin; none of an architecture that it does
    not know."""
    if not made:
        return []
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    (target,) = {re.search(r"^\.target sm_(\w+)", one.ptx, re.M)[1] for one in made}
    codes = [_code(one.cubin) for one in made]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        Path(file.name).write_bytes(b"".join(codes))
        done = subprocess.run([tool, "-b", f"SM{target}", "-ndf", file.name], capture_output=True, text=True)
    if "121" in target and done.returncode:
        return []
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*;)", done.stdout, re.M)
    assert len(lines) == sum(map(len, codes)) // 16
    texts = []
    for code in codes:
        count = len(code) // 16
        texts.append("\n".join(lines[:count]))
        lines = lines[count:]
    return texts


def _code(cubin: bytes) -> bytes:
    """The one section of an ELF file that has a kernel's instructions."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, num, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + n * size) for n in range(num)]
    names = cubin[sections[of_names][4] :]
    (found,) = [
        cubin[at : at + length]
        for name, _, _, _, at, length in sections
        if names[name:].startswith(b".text.")
    ]
    return found
