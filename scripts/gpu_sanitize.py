"""compute-sanitizer over the smallest tests of every kernel: memory, races, what nobody wrote, barriers.

PYTHONPATH=.:tests python3 scripts/gpu_sanitize.py [--seconds 240] [--parts linear,delta] [--processes 16]

Fails for an error, for a part that did not end well, and for a kernel that no test launched. Needs
compute-sanitizer 2026.1 or newer (`pip install nvidia-cuda-sanitizer-api`): older ones call it a race when a
warp group of Hopper waits for another. What TMA stores, initcheck did not see (2025.3, 2026.4): tests fill
such outputs before.
"""

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NamedTuple

import torch

from hemiola.plugins.gpu.launch import Kernel

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (2026, 1)
TOOLS = {
    "memcheck": ("--report-api-errors", "no"),  # cuda-python asks for functions that the driver lacks
    "racecheck": ("--racecheck-report", "hazard", "--show-backtrace", "no"),
    "initcheck": (),
    "synccheck": (),
}
# A launch takes a hundred times as long here: a storm or a product of each kind. Slow parts begin first.
PARTS = {
    "delta": (
        "test_recurrences_triton.py",
        "test_every_cut_has_the_plain_bits and delta and (base or small)",
    ),
    "moe": ("moe/test_triton.py", "test_all_tokens_choose_the_same_expert or test_an_id_that_is_no_expert"),
    "attention": ("attention/test_triton.py", "test_every_cut_has_the_plain_bits and base"),
    "prompts": (
        "attention/test_triton.py",
        "test_few_programs_go_from_item_to_item or test_what_nobody_wrote_before",
    ),
    "mamba2": ("test_recurrences_triton.py", "test_every_cut_has_the_plain_bits and mamba2 and base"),
    "conv": ("conv/test_triton.py", "test_every_cut_has_the_plain_bits and (base or small)"),
    "linear": (
        "linear/test_triton.py",
        "(test_against_fp64 and 100-72) or test_best_takes or test_best_of_a_broken"
        " or test_numbers_that_are_none",
    ),
    "linear_endings": ("linear/test_endings_triton.py", "test_it_is_the_reference"),
    "rows": (
        "gpu/test_triton.py",
        "test_an_id_that_is_no_row or test_gates_far_out or test_ties_go_to"
        " or test_what_is_not_a_number or test_a_place_that_the_table or test_lines_that_start",
    ),
    "step": ("step/test_forms.py", "test_every_op_of_a_step and cuda and bfloat16"),
    "clock": ("gpu/test_clock.py", "test"),
}
LAUNCHED = "launched: "  # what a test's process says of kernels
WORDS = 6_000  # characters that are shown of what is not clean
ERRORS = r"ERROR SUMMARY: (\d+) errors?()$"
RACES = r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)"


class Found(NamedTuple):
    part: str
    tool: str
    errors: int | None  # None: it did not come to its end
    tests: str
    seconds: float
    first: str  # what the tool says first
    launched: frozenset[str]
    said: str


class Check:
    """The tests of a part under a tool: a group of processes, which no signal reaches but ours."""

    def __init__(self, part: str, tool: str, folder: Path) -> None:
        self.part, self.tool, self.start = part, tool, time.monotonic()
        self.said = folder / f"{part}-{tool}"
        file, tests = PARTS[part]
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-s",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
        ]
        command = [
            *("compute-sanitizer", "--tool", tool, "--launch-timeout", "60", *TOOLS[tool], *pytest),
            *("-p", "gpu_sanitize", "-k", tests, f"tests/plugins/{file}"),
        ]
        environment = os.environ | {
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # else a block hides its borders
            "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]),
        }
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_over(self) -> bool:
        """Asked so that the process stays a zombie, and the name of its group its own."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def end(self) -> Found:
        """And the tests, which are the tool's children and may outlive it."""
        os.killpg(self.process.pid, signal.SIGKILL)
        status, seconds = self.process.wait(), time.monotonic() - self.start
        return read(self.part, self.tool, self.said.read_text(errors="replace"), status, seconds)


def run(checks: Iterable[tuple[str, str]], processes: int, until: float) -> Iterator[Found]:
    """Raises SystemExit when a signal asks for the end. However it ends, no check goes on."""
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # a script's background job is deaf to the first
        signal.signal(number, lambda number, frame: asked.append(number))
    waiting, running = deque(checks), list[Check]()
    with TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < processes:
                    running.append(Check(*waiting.popleft(), Path(folder)))
                for one in [one for one in running if time.monotonic() > until or one.is_over()]:
                    running.remove(one)
                    yield one.end()
                if asked:
                    sys.exit(128 + asked[0])
                time.sleep(0.05)
        finally:
            for one in running:
                one.end()


def read(part: str, tool: str, said: str, status: int, seconds: float) -> Found:
    """What a tool and its tests said. A word of the tool without an error is of records that it lost."""
    summary = re.findall(rf"^={{9}} {RACES if tool == 'racecheck' else ERRORS}", said, re.MULTILINE)
    counts = [int(errors) + int(warnings or 0) for errors, warnings in summary]
    messages = re.findall(r"^={9} (?!COMPUTE-SANITIZER|\w+ SUMMARY:)(\S.*)", said, re.MULTILINE)
    tests = re.findall(r"^(\d+ passed(?:, \d+ (?:deselected|warnings?))*) in [\d.]+s", said, re.MULTILINE)
    ended = status == 0 and len(counts) == 1 and tests and (counts[0] or not messages)
    names = re.findall(f"^{LAUNCHED}(.*)", said, re.MULTILINE)
    last = " ".join(said.split())[-80:]
    return Found(
        part, tool, counts[0] if ended else None, tests[-1] if ended else last,
        seconds, messages[0][:100] if messages else "",
        frozenset(names[-1].split() if names else ()), said,
    )  # fmt: skip


def all_kernels() -> frozenset[str]:
    files = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "plugins").rglob("cuda.py")]
    modules = [import_module(".".join(("hemiola", *file.parts))) for file in files]
    return frozenset(kernel.name for kernel in kernels_in(modules))


def kernels_in(modules: Iterable[ModuleType]) -> set[Kernel]:
    return {one for module in modules for one in vars(module).values() if isinstance(one, Kernel)}


def version() -> tuple[int, ...]:
    """Of the tool on the PATH; empty where there is none that says it."""
    try:
        asked = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(rb"^Version (\d+)\.(\d+)", asked.stdout, re.MULTILINE)
    return tuple(map(int, match.groups())) if match else ()


def row(one: Found) -> str:
    errors = "?" if one.errors is None else one.errors
    cells = (one.part, one.tool, errors, one.tests, f"{one.seconds:.0f}", one.first)
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--parts", default=",".join(PARTS), help="of these")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_sanitize.py: torch finds no CUDA device here")
    if (there := version()) < OLDEST:
        oldest, name = (".".join(map(str, numbers)) for numbers in (OLDEST, there))
        sys.exit(
            f"gpu_sanitize.py: compute-sanitizer {oldest} or newer is needed on the PATH, found"
            f" {name or 'none that says its version'}: pip install nvidia-cuda-sanitizer-api"
        )
    parts = asked.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"gpu_sanitize.py: --parts {', '.join(sorted(unknown))}: known are {', '.join(PARTS)}")
    until = time.monotonic() + asked.seconds
    print("| part | tool | errors | tests | seconds | first |")
    print("|---|---|---|---|---|---|")
    results = []
    for one in run(itertools.product(parts, TOOLS), asked.processes, until):
        results.append(one)
        print(row(one), flush=True)
    unclean = [one for one in results if one.errors != 0]
    for one in unclean:
        short = (
            one.said
            if len(one.said) <= WORDS
            else f"{one.said[: WORDS // 2]}\n[...]\n{one.said[-WORDS // 2 :]}"
        )
        print(f"\n{one.part} under {one.tool}:\n{short}")
    wrong = [f"{one.part} under {one.tool}" for one in unclean]
    for tool in TOOLS if set(parts) == set(PARTS) else ():
        launched = frozenset[str]().union(*(one.launched for one in results if one.tool == tool))
        wrong += [f"no test of {kernel} under {tool}" for kernel in sorted(all_kernels() - launched)]
    print(f"* {'wrong: ' + ', '.join(wrong) if wrong else 'all clean'}")
    sys.exit(bool(wrong))


# In a test's process, which has this file as a plugin of pytest.


def pytest_sessionfinish() -> None:
    """Says which kernels have binaries: those that were launched."""
    modules = [module for name, module in sys.modules.items() if name.startswith("hemiola.plugins")]
    names = sorted(kernel.name for kernel in kernels_in(modules) if kernel.binaries)
    print("\n" + LAUNCHED + " ".join(names))


if __name__ == "__main__":
    main()
