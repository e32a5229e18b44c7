"""What the script that runs compute-sanitizer takes for clean, on words that the tool has said or might."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hemiola.plugins.gpu.launch import Kernel

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def sanitize() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/gpu_sanitize.py")))


def test_every_ops_kernels_have_tests_under_the_sanitizer(sanitize: SimpleNamespace) -> None:
    """Those of linear had other names one day: none was found, and none was run."""
    folder = ROOT / "tests/plugins"
    for file, tests in sanitize.PARTS.values():
        there = re.findall(r"^def (test_\w+)", (folder / file).read_text(), re.MULTILINE)
        for name in re.findall(r"test\w*", tests):
            assert any(test.startswith(name) for test in there), f"{file}: {name}"
    asked = {file for file, _ in sanitize.PARTS.values()}
    assert asked >= {str(path.relative_to(folder)) for path in folder.glob("*/test_triton.py")}
    assert {"linear._dense", "step.fill._fill", "delta._few"} < sanitize.all_kernels()


CLEAN = """\
========= COMPUTE-SANITIZER
.
launched: attention._attend attention._prompt

1 passed, 81 deselected in 22.97s
"""
HAZARD = """\
========= Error: Potential RAW hazard detected at __shared__ 0x28d8e in block (58,0,0) :
=========     Write Thread (31,0,0) at _prompt+0x8d50
=========     Read Thread (320,0,0) at _prompt+0x1d0
=========     Current Value : 1
"""
UNWRITTEN = """\
========= Uninitialized __global__ memory read of size 8 bytes
========= ERROR SUMMARY: 380160 errors
========= ERROR SUMMARY: 380060 errors were not printed. Use --print-limit option
"""
SUMMARY = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, {} warnings)\n"


def test_errors_and_warnings_count(sanitize: SimpleNamespace) -> None:
    found = sanitize.read("attention", "racecheck", CLEAN + HAZARD * 3 + SUMMARY.format(3, 2, 1), 0, 1.0)
    assert found.errors == 3 and found.first.startswith("Error: Potential RAW")
    assert found.launched == {"attention._attend", "attention._prompt"} and HAZARD in found.said
    assert sanitize.read("attention", "racecheck", CLEAN + SUMMARY.format(0, 0, 0), 0, 1.0).errors == 0


def test_hazards_that_were_not_shown_count(sanitize: SimpleNamespace) -> None:
    """Of 1,373 the tool shows 100."""
    said = CLEAN + HAZARD * 100 + SUMMARY.format(100, 1373, 0)
    assert sanitize.read("attention", "racecheck", said, 0, 1.0).errors == 1373
    assert sanitize.read("linear", "initcheck", CLEAN + UNWRITTEN, 0, 1.0).errors == 380160


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("..\n", 0),
        (CLEAN + "========= ERROR SUMMARY: 0 errors\n", -11),
        (CLEAN, 0),
        (CLEAN.replace("deselected", "deselected, 1 error") + "========= ERROR SUMMARY: 0 errors\n", 0),
        ("a null was passed to free()\n========= ERROR SUMMARY: 0 errors\n", 0),
        (CLEAN + "========= Internal Sanitizer Error: -\n========= ERROR SUMMARY: 0 errors\n", 0),
        (CLEAN.replace("1 passed, 81", "82") + "========= ERROR SUMMARY: 0 errors\n", 5),
        (CLEAN.replace("passed", "passed, 3 skipped") + "========= ERROR SUMMARY: 0 errors\n", 0),
        (CLEAN + 2 * "========= ERROR SUMMARY: 0 errors\n", 0),
        (CLEAN + SUMMARY.format(0, 0, 0), 0),  # another tool's
        *(
            (f"========= {lost}\n{CLEAN}========= ERROR SUMMARY: 0 errors\n", 0)
            for lost in (
                "Warning: Detected overflow of tracked cuda::barrier structures. Results might be incorrect.",
                "Detected a failure to track a kernel launch. Future records might be incomplete",
                "Error: process didn't terminate successfully",
            )
        ),
    ],
)
def test_what_did_not_come_to_a_good_end_is_not_clean(
    sanitize: SimpleNamespace, said: str, status: int
) -> None:
    found = sanitize.read("delta", "memcheck", said, status, 1.0)
    assert found.errors is None and "\n" not in found.tests


TOOL = """\
#!{python} -IS
import json, os, sys
said = json.loads(os.environ["SAID"])
if sys.argv[1] == "--version":
    sys.exit(print("Version", said["version"]))
words = " ".join(sys.argv)
assert " -p gpu_sanitize " in words and os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
tool, tests = sys.argv[2], sys.argv[sys.argv.index("-k") + 1]
asked = {{"memcheck": "--report-api-errors no", "racecheck": "--racecheck-report hazard"}}
assert asked.get(tool, "") in words
print(said.get(f"{{tool}} {{tests}}") or said[tool])
"""
RACE = HAZARD + SUMMARY.format(1, 1, 0)
NO_RACE = SUMMARY.format(0, 0, 0)


@pytest.mark.parametrize(
    ("racing", "unseen", "wrong"),
    [
        ({}, "", ""),
        ({"moe": RACE}, "", "moe under racecheck"),
        ({"moe": f"========= Internal Sanitizer Error: -\n{NO_RACE}"}, "", "moe under racecheck"),
        ({}, "linear._dense", "no test of linear._dense under initcheck"),
    ],
    ids=["clean", "a race", "no end", "a kernel without a test"],
)
def test_all_parts_all_tools_and_all_kernels_decide(
    sanitize: SimpleNamespace,
    racing: dict,
    unseen: str,
    wrong: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = {part: sanitize.PARTS[part] for part in ("moe", "linear", "clock")}
    monkeypatch.setitem(sanitize.main.__globals__, "PARTS", few)
    launched = " ".join(sanitize.all_kernels())
    clean = CLEAN.replace("attention._attend attention._prompt", launched)
    said = {tool: clean + "========= ERROR SUMMARY: 0 errors\n" for tool in sanitize.TOOLS}
    said |= {"version": "2026.10.0.0 (build 39022338)", "racecheck": clean + NO_RACE}
    said["initcheck"] = said["initcheck"].replace(f" {unseen}", "") if unseen else said["initcheck"]
    said |= {f"racecheck {few[part][1]}": clean + race for part, race in racing.items()}
    (tmp_path / "compute-sanitizer").write_text(TOOL.format(python=sys.executable))
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SAID", json.dumps(said))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["gpu_sanitize.py", "--processes", "2"])
    with pytest.raises(SystemExit) as ended:
        sanitize.main()
    text = capsys.readouterr().out
    assert ended.value.code == bool(wrong)
    assert text.splitlines()[-1] == (f"* wrong: {wrong}" if wrong else "* all clean")
    assert (HAZARD in text) == (RACE in racing.values())
    assert text.count("\n| ") == len(sanitize.TOOLS) * len(few), text


def test_kernels_that_were_not_launched_are_not_said_to_be(
    sanitize: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, unseen = Kernel("some", "_seen"), Kernel("some", "_unseen")
    seen.binaries["one"] = SimpleNamespace()
    module = SimpleNamespace(_seen=seen, _unseen=unseen)
    monkeypatch.setitem(sys.modules, "hemiola.plugins.some.cuda", module)
    sanitize.pytest_sessionfinish()
    said = capsys.readouterr().out
    assert said.startswith("\nlaunched: ") and "some._seen" in said and "some._unseen" not in said


@pytest.mark.parametrize("version", ["2025.3.1.0 (build 36400806)", "2026.0.1", "2025.10.0.0", "?", None])
def test_a_tool_that_is_too_old_is_refused(
    sanitize: SimpleNamespace, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reported 1,373 races where warps of Hopper wait for each other."""
    if version:
        (tmp_path / "compute-sanitizer").write_text(TOOL.format(python=sys.executable))
        (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SAID", json.dumps({"version": version}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["gpu_sanitize.py"])
    found = ".".join(version.split(".")[:2]) if version and version != "?" else "none that says its version"
    with pytest.raises(SystemExit, match=f"2026.1 or newer is needed .* found {found}: pip install"):
        sanitize.main()


SLEEPS = """\
#!/bin/sh
[ "$1" = --version ] && exec echo Version 2026.4.0.0
sleep 100 &
echo $! > {folder}/$!
{then}
"""
ALONE = """
import runpy, signal, torch
torch.cuda.is_available = lambda: True
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a background job of a script begins
runpy.run_path({!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("seconds", "word", "then"),
    [
        ("5", None, "wait"),
        ("90", signal.SIGINT, "wait"),
        ("90", signal.SIGTERM, "wait"),
        ("90", None, "kill -SEGV $$"),
    ],
    ids=["out of time", "interrupted", "ended", "a tool died"],
)
def test_no_tests_outlive_the_script(
    seconds: str, word: signal.Signals | None, then: str, tmp_path: Path
) -> None:
    """They are the tool's children, and would keep the GPU."""

    def pids() -> list[str]:
        return [path.name for path in tmp_path.glob("[0-9]*") if path.read_text()]

    (tmp_path / "compute-sanitizer").write_text(SLEEPS.format(folder=tmp_path, then=then))
    (tmp_path / "compute-sanitizer").chmod(0o755)
    code = ALONE.format(str(ROOT / "scripts/gpu_sanitize.py"))
    options = ["--parts", "clock", "--processes", "4", "--seconds", seconds]
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    script = subprocess.Popen(
        [sys.executable, "-c", code, *options], env=environment, stderr=subprocess.DEVNULL
    )
    while len(pids()) < 4:
        assert script.poll() is None or len(pids()) == 4
        time.sleep(0.01)
    if word:
        script.send_signal(word)
    assert script.wait(60) == (128 + word if word else 1)
    states = [Path(f"/proc/{pid}/stat") for pid in pids()]
    assert all(not state.exists() or ") Z " in state.read_text() for state in states)
