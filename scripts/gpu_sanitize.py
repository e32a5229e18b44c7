"""compute-sanitizer over the smallest tests of every kernel: memory, races and reads of what nobody wrote.

PYTHONPATH=.:tests python3 scripts/gpu_sanitize.py [--seconds 180] [--ops linear,delta] [--processes 14]
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck")
SLOW = ("attention", "delta", "mamba2", "moe")  # begin first
# One storm or product of each kind: a launch takes a hundred times as long here.
TESTS = (
    "test_every_cut_has_the_plain_bits and (base or small)",
    "test_against_fp64 and 100-72",
    "test_best_takes",
    "test_best_of_a_broken",
    "test_it_is_the_reference",
    "test_an_id_that_is_no_row",
    "test_all_tokens_choose_the_same_expert",
    "test_an_id_that_is_no_expert",
    "test_gates_far_out",
    "test_ties_go_to",
    "test_what_is_not_a_number",
    "test_a_place_that_the_table",
    "test_lines_that_start",
)


class Found(NamedTuple):
    op: str
    tool: str
    errors: str
    tests: str
    seconds: float
    first: str  # what the tool says first


def check(op: str, tool: str, until: float) -> Found:
    """The tests of an op under a tool."""
    start = time.monotonic()
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    asked = " or ".join(f"({name})" for name in TESTS)
    tests = [*pytest, "-k", asked, f"tests/plugins/{op}/test_triton.py"]
    tools = ["compute-sanitizer", "--tool", tool, "--launch-timeout", "60"]
    if tool == "memcheck":  # cuda-python asks for functions that the driver lacks; tests see a refused launch
        tools += ["--report-api-errors", "no"]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else a block hides its borders
    try:
        done = subprocess.run(
            [*tools, *tests], cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=max(until - time.monotonic(), 1),
        )  # fmt: skip
        said = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        parts = (error.stdout or b"", error.stderr or b"")
        said = "".join(part.decode() if isinstance(part, bytes) else part for part in parts) + "\nout of time"
    errors = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", said)
    tests_said = re.findall(r"\d+ (?:passed|failed|error).* in [\d.]+s", said)
    first = re.findall(r"^========= (?!COMPUTE|ERROR SUMMARY|RACECHECK SUMMARY)\S.*", said, re.MULTILINE)
    return Found(
        op, tool, errors[-1] if errors else "?", tests_said[-1] if tests_said else said.strip()[-80:],
        time.monotonic() - start, first[0][10:100] if first else "",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--ops", default="")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_sanitize.py: torch finds no CUDA device here")
    if shutil.which("compute-sanitizer") is None:
        sys.exit("gpu_sanitize.py: there is no compute-sanitizer on the PATH")
    all_ops = [path.parent.name for path in sorted((ROOT / "tests/plugins").glob("*/test_triton.py"))]
    ops = asked.ops.split(",") if asked.ops else sorted(all_ops, key=lambda op: op not in SLOW)
    pairs = [(op, tool) for op in ops for tool in TOOLS]
    until = time.monotonic() + asked.seconds
    print("| op | tool | errors | tests | seconds | first |")
    print("|---|---|---|---|---|---|")
    is_clean = True
    with ThreadPoolExecutor(asked.processes) as pool:
        for done in as_completed([pool.submit(check, *pair, until) for pair in pairs]):
            found = done.result()
            print(f"| {' | '.join(map(str, found[:4]))} | {found.seconds:.0f} | {found.first} |", flush=True)
            is_clean &= found.errors == "0" and "passed" in found.tests and "failed" not in found.tests
    sys.exit(not is_clean)


if __name__ == "__main__":
    main()
