"""What a compiled kernel does before it waits for the kernels before it."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

# in PTX and in what the assembler made of it: instructions that must not stand before the one that waits
WAITS = ("griddepcontrol.wait;", "ACQBULK")
NEVER_BEFORE = (
    r"\b(?:ld(?!\.param|\.shared)|st(?!\.shared)|atom|red|cp|bra|ret|exit|trap)\b[^;]*;",
    r"\b(?:LD|LDG|LDGSTS|ST|STG|ATOMG?|REDG?|UTMALDG|UTMASTG|UTMAREDG|UBLKCP|EXIT|RET)\b[^;]*;",
)


def too_early(ptx: str, cubin: bytes, waits: bool) -> list[str]:
    """What a kernel must not do before it waits for others; what one has of this that should not wait."""
    entry = ptx[ptx.index("{", ptx.index(".visible .entry")) :]
    if not waits:
        return re.findall(r"^.*(?:griddepcontrol|// early).*$", entry, re.M)
    found, codes = [], (entry, *_disassembled(cubin))
    for code, wait, never in zip(codes, WAITS, NEVER_BEFORE, strict=False):
        before, is_there, _ = code.partition(wait)
        found += re.findall(never, before) if is_there else [f"no {wait}"]
    return found


def _disassembled(cubin: bytes) -> list[str]:
    """None of an architecture that Triton's tool does not know."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True)
    if "Cannot decode architecture 'SM121" in done.stderr:
        return []
    assert done.returncode == 0, done.stderr
    return [done.stdout]
