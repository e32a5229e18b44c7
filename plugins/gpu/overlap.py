"""Kernels that are scheduled while the one before them in a stream ends: programmatic dependent launch.

The law: every thread of every kernel waits before it reads or writes memory. `griddepcontrol.wait` returns
when the kernel before has ended and what it wrote can be seen. That one ended behind a wait of its own, so
all before it have ended, too. A block that ended without waiting would break this for all kernels behind it,
so the wait stands where no branch can miss it. A kernel that torch launches begins when everything before it
has ended, and a kernel of ours waits for all of it. Launched without the attribute that plugins/gpu/driver.py
gives, by TensorRT and by Triton itself, the two instructions do nothing.
"""

import re
from typing import Any

FIRST = 90  # the compute capability that has the instructions
WAIT, RELEASE = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"  # the next kernel is scheduled
NEWER = re.compile(r"^\s*(?:griddepcontrol\.|.*// early).*\n", re.M)  # what plugins/gpu/early.py writes
ENTRY = re.compile(r"\.visible \.entry [^{]*\{\n")


def waiting(ptx: str) -> str:
    """The kernel, waiting where it says so (plugins/gpu/early.py), or else before all it does."""
    if WAIT in ptx:
        return ptx
    head = ENTRY.search(ptx)
    assert head is not None
    return f"{ptx[: head.end()]}\t{WAIT}\n\t{RELEASE}\n{ptx[head.end() :]}"


def hook(self: Any, stages: dict[str, Any], options: Any, language: Any, capability: Any) -> None:
    """Triton's: kernels wait if compiled with its option launch_pdl, which its cache knows.

    An older GPU has no such instructions.
    """
    make = stages["ptx"]
    if options.launch_pdl:
        stages["ptx"] = lambda *given: waiting(make(*given))
    elif capability < FIRST:
        stages["ptx"] = lambda *given: NEWER.sub("", make(*given))
