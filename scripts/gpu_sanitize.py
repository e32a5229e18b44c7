"""compute-sanitizer over the smallest tests of every kernel: memory, races and reads of what nobody wrote.

PYTHONPATH=.:tests python3 scripts/gpu_sanitize.py [--seconds 180] [--parts linear,delta] [--processes 16]

Fails for an error, for a part that did not end, and for a kernel that no test launched. One thing is counted
apart: how Triton tells groups of warps what to run, bytes of its own in shared memory behind a barrier of all
warps, is a race to racecheck. The part "control" shows it: two groups of warps that share nothing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
TOOLS = {
    "memcheck": ("--report-api-errors", "no"),  # cuda-python asks for functions that the driver lacks
    "racecheck": ("--racecheck-report", "hazard", "--print-limit", "100000", "--show-backtrace", "no"),
    "initcheck": (),
}
# A launch takes a hundred times as long here: a storm or a product of each kind. Slow parts begin first.
PARTS = {
    "delta": ("delta/test_triton.py", "test_every_cut_has_the_plain_bits and (base or small)"),
    "moe": ("moe/test_triton.py", "test_all_tokens_choose_the_same_expert or test_an_id_that_is_no_expert"),
    "attention": ("attention/test_triton.py", "test_every_cut_has_the_plain_bits and base"),
    "prompts": (
        "attention/test_triton.py",
        "test_a_prompt_among_many_rows or test_what_nobody_wrote_before",
    ),
    "mamba2": ("mamba2/test_triton.py", "test_every_cut_has_the_plain_bits and (base or small)"),
    "conv": ("conv/test_triton.py", "test_every_cut_has_the_plain_bits and (base or small)"),
    "linear": (
        "linear/test_triton.py",
        "(test_against_fp64 and 100-72) or test_best_takes or test_best_of_a_broken"
        " or test_numbers_that_are_none",
    ),
    "fused_linear": ("fused_linear/test_triton.py", "test_it_is_the_reference"),
    "rows": (
        "gpu/test_triton.py",
        "test_an_id_that_is_no_row or test_gates_far_out or test_ties_go_to"
        " or test_what_is_not_a_number or test_a_place_that_the_table or test_lines_that_start",
    ),
    "ledger": ("gpu/test_ledger.py", "test"),
    "step": ("gpu/test_step.py", "test_steps_are_those_of_any_device and greedy and 0"),
    "clock": ("gpu/test_clock.py", "test"),
    "control": ("gpu/test_warps.py", "test"),
}
CONTROL = "_apart"  # a kernel whose warps share nothing else
RESERVED = 1024  # bytes of shared memory before a kernel's own, as racecheck counts them
DEFAULT_WARPS = 4  # of a kernel whose warps are told what to run
SWITCH = r"barrier\.sync[ \t]+1;\n(?:.*\n){,3}?[ \t]*ld\.shared\.b8[^\n]*\+(\d+)\];"  # behind it they look
HAZARD = re.compile(r"hazard detected at __shared__ 0x(\w+) .*\n=+ +\w+ Thread .* at (\w+)\+0x")
TOLD = "warps of {} are told at {}:{}"  # what a test's process says of a kernel
LAUNCHED = "launched: "


class Found(NamedTuple):
    part: str
    tool: str
    errors: int | None  # None: it did not come to its end
    tritons: int  # hazards where Triton tells warps what to run
    tests: str
    seconds: float
    first: str  # what the tool says first
    launched: frozenset[str]

    @property
    def is_clean(self) -> bool:
        return self.errors == 0 and "passed" in self.tests and "failed" not in self.tests


def check(part: str, tool: str, until: float) -> Found:
    """The tests of a part under a tool."""
    start = time.monotonic()
    file, tests = PARTS[part]
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [
        *("compute-sanitizer", "--tool", tool, "--launch-timeout", "60", *TOOLS[tool], *pytest),
        *("-p", "gpu_sanitize", "-k", tests, f"tests/plugins/{file}"),
    ]
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # else a block hides its borders
        "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]),
    }
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=max(until - time.monotonic(), 1),
        )  # fmt: skip
        said = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        pieces = (error.stdout or b"", error.stderr or b"")
        said = "".join(text.decode() if isinstance(text, bytes) else text for text in pieces)
        said += "\nout of time"
    return read(part, tool, said, time.monotonic() - start)


def read(part: str, tool: str, said: str, seconds: float) -> Found:
    """What a tool and its tests said."""
    told = [
        (kernel, range(RESERVED + int(begin), RESERVED + int(end)))
        for kernel, begin, end in re.findall(TOLD.format(r"(\w+)", r"(\d+)", r"(\d+)"), said)
    ]
    tritons = sum(
        kernel == CONTROL or any(kernel == name and int(address, 16) in places for name, places in told)
        for address, kernel in HAZARD.findall(said)
    )
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", said)
    tests = re.findall(r"\d+ (?:passed|failed|error).* in [\d.]+s", said)
    first = re.findall(r"^========= (?!COMPUTE|ERROR SUMMARY|RACECHECK SUMMARY)\S.*", said, re.MULTILINE)
    errors = int(summary[-1]) - tritons if summary else None
    names = re.findall(rf"^{LAUNCHED}(.*)", said, re.MULTILINE)
    return Found(
        part, tool, errors, tritons, tests[-1] if tests else said.strip()[-80:], seconds,
        first[0][10:100] if first and errors != 0 else "", frozenset(names[-1].split() if names else ()),
    )  # fmt: skip


def all_kernels() -> frozenset[str]:
    made = re.compile(r'Kernel\("([\w.]+)", "(\w+)"\)')
    texts = [path.read_text() for path in (ROOT / "plugins").rglob("cuda.py")]
    return frozenset(f"{op}.{entry}" for text in texts for op, entry in made.findall(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--parts", default=",".join(PARTS), help="of these")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_sanitize.py: torch finds no CUDA device here")
    if shutil.which("compute-sanitizer") is None:
        sys.exit("gpu_sanitize.py: there is no compute-sanitizer on the PATH")
    parts = asked.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"gpu_sanitize.py: --parts {', '.join(sorted(unknown))}: known are {', '.join(PARTS)}")
    until = time.monotonic() + asked.seconds
    print("| part | tool | errors | Triton's own | tests | seconds | first |")
    print("|---|---|---|---|---|---|---|")
    found = []
    with ThreadPoolExecutor(asked.processes) as pool:
        for done in as_completed([pool.submit(check, part, tool, until) for part in parts for tool in TOOLS]):
            found.append(one := done.result())
            errors = "?" if one.errors is None else one.errors
            line = (one.part, one.tool, errors, one.tritons, one.tests, f"{one.seconds:.0f}", one.first)
            print(f"| {' | '.join(map(str, line))} |", flush=True)
    is_clean = all(one.is_clean for one in found)
    if set(parts) == set(PARTS):
        for tool in TOOLS:
            launched = frozenset[str]().union(*(one.launched for one in found if one.tool == tool))
            missing = all_kernels() - launched
            names = f"but {', '.join(sorted(missing))}" if missing else "of the package"
            print(f"* {tool}: {len(launched)} kernels, all {names}")
            is_clean &= not missing
    sys.exit(not is_clean)


# In a test's process, which has this file as a plugin of pytest.
_told: list[str] = []


def pytest_configure() -> None:
    """Looks where in shared memory a kernel's warps are told what to run."""
    from hemiola.plugins.gpu import compile as compiling

    before = compiling.compile_call

    @wraps(before)
    def compile_call(*given: Any) -> Any:
        made = before(*given)
        warps = made.binary.threads // 32
        for place in re.findall(SWITCH, made.ptx):
            begin = int(place) + DEFAULT_WARPS
            _told.append(TOLD.format(made.binary.symbol, begin, begin + warps - DEFAULT_WARPS))
        return made

    compiling.compile_call = compile_call


def pytest_sessionfinish() -> None:
    """Says so, and what was launched."""
    from hemiola.plugins.gpu.launch import Kernel

    modules = [module for name, module in sys.modules.items() if name.startswith("hemiola.plugins")]
    kernels = {one for module in modules for one in vars(module).values() if isinstance(one, Kernel)}
    names = sorted(kernel.name for kernel in kernels if kernel.binaries)
    print("", *_told, LAUNCHED + " ".join(names), sep="\n")


if __name__ == "__main__":
    main()
