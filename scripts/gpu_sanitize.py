"""compute-sanitizer over the smallest tests of every kernel: memory, races and reads of what nobody wrote.

PYTHONPATH=.:tests python3 scripts/gpu_sanitize.py [--seconds 180] [--parts linear,delta] [--processes 16]

Fails for an error, for a part that did not end well, and for a kernel that no test launched. One thing is
counted apart: how Triton tells groups of warps what to run. The first four warps write a byte for each other
one, which looks at its own behind a barrier of all; racecheck calls that a race. The part "control" shows it:
two groups of warps that share nothing. Without it, such reports count.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
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
RESERVED = 1024  # bytes of shared memory before a kernel's own, as racecheck counts them
WARP, DEFAULT_WARPS = 32, 4  # threads; the warps that tell the others
SWITCH = r"barrier\.sync[ \t]+1;\n(?:.*\n){,3}?[ \t]*ld\.shared\.b8[^\n]*\+(\d+)\];"  # behind it they look
HAZARD = re.compile(
    r"^=+ \w+: Potential RAW hazard detected at __shared__ 0x(\w+) .*\n"
    r"=+ +Write Thread \((\d+),0,0\) at .*\n=+ +Read Thread \((\d+),0,0\) at (\w+)\+0x.*\n",
    re.MULTILINE,
)
TOLD = "warps of {} are told from {} on"  # what a test's process says of a kernel
TOLD_AS = re.compile("^" + TOLD.format(r"(\w+)", r"(\d+)") + "$", re.MULTILINE)
LAUNCHED = "launched: "
running: set[subprocess.Popen[str]] = set()  # each a group of its own, which no signal reaches but ours


class Found(NamedTuple):
    part: str
    tool: str
    errors: int | None  # None: it did not come to its end
    tritons: int  # hazards where Triton tells warps what to run
    tests: str
    seconds: float
    first: str  # what the tool says first
    launched: frozenset[str]


def check(part: str, tool: str, until: float) -> Found:
    """The tests of a part under a tool."""
    start = time.monotonic()
    file, tests = PARTS[part]
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [
        *("compute-sanitizer", "--tool", tool, "--launch-timeout", "60", *TOOLS[tool], *pytest),
        *("-p", "gpu_sanitize", "-k", tests, f"tests/plugins/{file}"),
    ]
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # else a block hides its borders
        "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    running.add(process)
    try:
        said, _ = process.communicate(timeout=max(until - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        end(process)
        said, _ = process.communicate()
    running.remove(process)
    return read(part, tool, said, process.returncode, time.monotonic() - start)


def end(process: subprocess.Popen[str]) -> None:
    """And the tests, which are the tool's child."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read(part: str, tool: str, said: str, status: int, seconds: float) -> Found:
    """What a tool and its tests said."""
    told = {(kernel, RESERVED + int(begin)) for kernel, begin in TOLD_AS.findall(said)}
    tritons = sum(is_tritons(hazard, told) for hazard in HAZARD.finditer(said))
    rest = HAZARD.sub(lambda hazard: "" if is_tritons(hazard, told) else hazard[0], said)
    counts = re.findall(r"^=+ ERROR SUMMARY: (\d+) errors?", said, re.MULTILINE)
    counts += [
        int(errors) + int(warnings)
        for errors, warnings in re.findall(
            r"^=+ RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)", said, re.MULTILINE
        )
    ]
    tests = re.findall(r"^(\d+ passed\b(?!.*\b(?:failed|errors?)\b).*) in [\d.]+s", said, re.MULTILINE)
    ended = status == 0 and len(counts) == 1 and tests and "Internal Sanitizer Error" not in said
    messages = re.findall(r"^=+ (?!COMPUTE|ERROR SUMMARY|RACECHECK SUMMARY)\S.*", rest, re.MULTILINE)
    names = re.findall(f"^{LAUNCHED}(.*)", said, re.MULTILINE)
    last = " ".join(said.split())[-80:]
    return Found(
        part, tool, int(counts[0]) - tritons if ended else None, tritons, tests[-1] if ended else last,
        seconds, messages[0].strip("= ")[:100] if messages else "",
        frozenset(names[-1].split() if names else ()),
    )  # fmt: skip


def is_tritons(hazard: re.Match[str], told: Collection[tuple[str, int]]) -> bool:
    """A warp looks at its own byte, which one of those wrote that tell."""
    address, writer, reader = int(hazard[1], 16), int(hazard[2]), int(hazard[3])
    first = address - reader // WARP + DEFAULT_WARPS
    apart = writer < DEFAULT_WARPS * WARP <= reader and reader % WARP == 0
    return apart and (hazard[4], first) in told


def all_kernels() -> frozenset[str]:
    made = re.compile(r'Kernel\("([\w.]+)", "(\w+)"\)')
    texts = [path.read_text() for path in (ROOT / "plugins").rglob("cuda.py")]
    return frozenset(f"{op}.{entry}" for text in texts for op, entry in made.findall(text))


def row(one: Found) -> str:
    errors = "?" if one.errors is None else one.errors
    cells = (one.part, one.tool, errors, one.tritons, one.tests, f"{one.seconds:.0f}", one.first)
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


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
        checks = [pool.submit(check, part, tool, until) for part in parts for tool in TOOLS]
        try:
            for done in as_completed(checks):
                found.append(done.result())
                print(row(found[-1]), flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                end(process)
            raise
    wrong = [f"{one.part} under {one.tool}" for one in found if one.errors != 0]
    if any(one.tritons for one in found) and not any(one.tritons for one in found if one.part == "control"):
        wrong.append("hazards that the control does not show")
    for tool in TOOLS if set(parts) == set(PARTS) else ():
        launched = frozenset[str]().union(*(one.launched for one in found if one.tool == tool))
        wrong += [f"no test of {kernel} under {tool}" for kernel in sorted(all_kernels() - launched)]
    print(f"* {'wrong: ' + ', '.join(wrong) if wrong else 'all clean'}")
    sys.exit(bool(wrong))


# In a test's process, which has this file as a plugin of pytest.


def pytest_configure() -> None:
    """Says of every kernel that is compiled where in shared memory its warps are told what to run."""
    from hemiola.plugins.gpu import compile as compiling

    before = compiling.compile_call

    @wraps(before)
    def compile_call(*given: Any) -> Any:
        made = before(*given)
        for place in re.findall(SWITCH, made.ptx):
            print("\n" + TOLD.format(made.binary.symbol, int(place) + DEFAULT_WARPS))
        return made

    compiling.compile_call = compile_call


def pytest_sessionfinish() -> None:
    """Says which kernels have binaries: those that were launched."""
    from hemiola.plugins.gpu.launch import Kernel

    modules = [module for name, module in sys.modules.items() if name.startswith("hemiola.plugins")]
    kernels = {one for module in modules for one in vars(module).values() if isinstance(one, Kernel)}
    names = sorted(kernel.name for kernel in kernels if kernel.binaries)
    print("\n" + LAUNCHED + " ".join(names))


if __name__ == "__main__":
    main()
