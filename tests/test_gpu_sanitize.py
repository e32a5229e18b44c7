"""What the script that runs compute-sanitizer takes for clean, on words that the tool has said or might."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hemiola.plugins.gpu import launch

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
    assert {"linear._dense", "gpu.ledger._fill", "delta._few"} < sanitize.all_kernels()


CLEAN = """\
========= COMPUTE-SANITIZER

warps of _prompt are told from 166280 on
.
launched: attention._attend attention._prompt

1 passed, 81 deselected in 22.97s
"""
HAZARD = """\
========= Error: Potential {kind} hazard detected at __shared__ {place} in block (58,0,0) :
=========     Write Thread ({writer},0,0) at {kernel}+0x8d50
=========     {other} Thread ({reader},0,0) at {kernel}+0x1d0
=========     Current Value : 1
"""
TOLD = {"kind": "RAW", "place": "0x28d8e", "writer": 31, "kernel": "_prompt", "other": "Read", "reader": 320}
SUMMARY = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, {} warnings)\n"


def hazard(**others: object) -> str:
    return HAZARD.format(**TOLD | others)


@pytest.mark.parametrize(
    "real",
    [
        {"kernel": "_attend"},
        {"kind": "WAW", "other": "Write"},
        {"place": "0x28d8d"},  # another warp's byte
        {"reader": 321},
        {"writer": 130},
    ],
    ids=str,
)
def test_only_a_warp_that_looks_at_its_own_byte_races_with_triton(
    sanitize: SimpleNamespace, real: dict
) -> None:
    twice = CLEAN + hazard() + hazard(place="0x28d88", reader=128)
    found = sanitize.read("attention", "racecheck", twice + SUMMARY.format(2, 2, 0), 0, 1.0)
    assert (found.errors, found.tritons, found.first) == (0, 2, "")
    assert found.launched == {"attention._attend", "attention._prompt"}
    found = sanitize.read("attention", "racecheck", twice + hazard(**real) + SUMMARY.format(3, 2, 1), 0, 1.0)
    assert (found.errors, found.tritons) == (1, 2) and found.first.startswith("Error: Potential")


def test_hazards_that_were_not_shown_count(sanitize: SimpleNamespace) -> None:
    """Of 1,373 the tool shows 100."""
    said = CLEAN + hazard() * 100 + SUMMARY.format(100, 1373, 0)
    assert sanitize.read("attention", "racecheck", said, 0, 1.0).errors == 1273


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
    ],
)
def test_what_did_not_come_to_a_good_end_is_not_clean(
    sanitize: SimpleNamespace, said: str, status: int
) -> None:
    found = sanitize.read("delta", "memcheck", said, status, 1.0)
    assert found.errors is None and "\n" not in found.tests


@pytest.fixture
def told(sanitize: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[[launch.Call], Any]:
    """Compiles for sm_90, under the plugin."""
    pytest.importorskip("triton", reason="needs Triton")
    from hemiola.plugins.gpu import compile as compiling

    monkeypatch.setattr(compiling, "compile_call", compiling.compile_call)
    sanitize.pytest_configure()

    def get(call: launch.Call) -> Any:
        return compiling.compile_call(call, 90).binary

    return get


def test_the_plugin_says_where_warps_are_told_what_to_run(
    told: Callable[[launch.Call], Any],
    sanitize: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their bytes are the last that a kernel has."""
    from hemiola.plugins.gpu import compile as compiling
    from tests.plugins.gpu.test_warps import _apart

    constants = {"G": 1, "R": 2, "D": 128, "L": 16, "FIRST": 0, "STAGES": 4}
    constants |= {"num_warps": 4, "enable_fp_fusion": False}
    boxes = ("<bf16 64 128>", "<bf16 64 64>")
    kinds = ("*bf16:16", *boxes, "*i32?", "*i32?", "*bf16:16", "fp32", "fp32", *["i32?"] * 3, "i32:16")
    binary = told(launch.Call("attention._prompt", kinds, tuple(sorted(constants.items()))))
    begin = binary.shared - binary.threads // 32 + 4
    assert sanitize.TOLD_AS.findall(capsys.readouterr().out) == [("_prompt", str(begin))]
    monkeypatch.setattr(compiling, "source", lambda name: _apart)
    binary = told(launch.Call("control._apart", ("*i32?", "i32"), (("num_warps", 4),)))
    begin = binary.shared - binary.threads // 32 + 4
    assert sanitize.TOLD_AS.findall(capsys.readouterr().out) == [("_apart", str(begin))]


TOOL = """\
#!{python}
import json, os, sys
said = json.loads(os.environ["SAID"])
tool, tests = sys.argv[2], sys.argv[sys.argv.index("-k") + 1]
print(said.get(f"{{tool}} {{tests}}") or said[tool])
"""
RACE = hazard() + SUMMARY.format(1, 1, 0)
NO_RACE = SUMMARY.format(0, 0, 0)


@pytest.mark.parametrize(
    ("racing", "unseen", "wrong"),
    [
        ({}, "", ""),
        ({"prompts": RACE, "control": RACE.replace("_prompt", "_apart")}, "", ""),
        ({"prompts": RACE}, "", "hazards that the control does not show"),
        ({"delta": RACE.replace("_prompt", "_step")}, "", "delta under racecheck"),
        ({"moe": f"========= Internal Sanitizer Error: -\n{NO_RACE}"}, "", "moe under racecheck"),
        ({}, "linear._dense", "no test of linear._dense under memcheck"),
    ],
    ids=["clean", "Triton's own", "no control", "a race", "no end", "a kernel without a test"],
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
    launched = sorted(sanitize.all_kernels() - {unseen})
    clean = CLEAN.replace("attention._attend attention._prompt", " ".join(launched))
    clean = clean.replace("\n.\n", "\nwarps of _apart are told from 166280 on\n.\n")
    said = {tool: clean + "========= ERROR SUMMARY: 0 errors\n" for tool in ("memcheck", "initcheck")}
    said["racecheck"] = clean + NO_RACE
    said |= {f"racecheck {sanitize.PARTS[part][1]}": clean + race for part, race in racing.items()}
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
    assert text.splitlines()[-1].startswith(f"* wrong: {wrong}" if wrong else "* all clean")
    assert text.count("\n| ") == 3 * len(sanitize.PARTS), text


SLEEPS = """\
#!/bin/sh
sleep 100 &
echo $! > {folder}/$!
wait
"""
ALONE = (
    "import runpy, torch; torch.cuda.is_available = lambda: True; runpy.run_path({!r}, run_name='__main__')"
)


@pytest.mark.parametrize("seconds", [5, 90], ids=["out of time", "interrupted"])
def test_no_tests_outlive_the_script(seconds: int, tmp_path: Path) -> None:
    """They are the tool's children, and would keep the GPU."""
    (tmp_path / "compute-sanitizer").write_text(SLEEPS.format(folder=tmp_path))
    (tmp_path / "compute-sanitizer").chmod(0o755)
    code = ALONE.format(str(ROOT / "scripts/gpu_sanitize.py"))
    options = ["--parts", "clock,control", "--processes", "6", "--seconds", str(seconds)]
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    script = subprocess.Popen(
        [sys.executable, "-c", code, *options], env=environment, stderr=subprocess.DEVNULL
    )
    while len(pids := [path.name for path in tmp_path.glob("[0-9]*") if path.read_text()]) < 6:
        assert script.poll() is None
        time.sleep(0.01)
    if seconds == 90:
        script.send_signal(signal.SIGINT)
    assert script.wait(60)
    states = [Path(f"/proc/{pid}/stat") for pid in pids]
    assert all(not state.exists() or ") Z " in state.read_text() for state in states)
