"""The script that spends a GPU's minutes, on stages that need none; its own stages say that there is none."""

import importlib
import importlib.util
import json
import re
import runpy
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
TESTS = """\
============ test session starts ============
[gw0] [ 33%] PASSED tests/a.py::one
[gw1] [ 66%] FAILED tests/a.py::two
[gw1] [100%] SKIPPED tests/a.py::three
FAILED tests/a.py::two - AssertionError
"""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_session", ROOT / "scripts/gpu_session.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {"KEPT": tmp_path / "kept", "LEASE": tmp_path / "lease", "PATIENCE": 0.2}.items():
        monkeypatch.setattr(module, name, value)
    for name in ("SITE", "ENGINES", "VLLM"):
        monkeypatch.setattr(module, name, tmp_path / "kept" / name.lower())
    return module


def stages(session: ModuleType, *made: tuple) -> tuple:
    return tuple(session.Stage(*fields) for fields in made)


def run(session: ModuleType, out: Path, *arguments: str) -> str:
    """The summary."""
    sys.argv = ["gpu_session.py", "--out", str(out), *arguments]
    session.main()
    return (out / "summary.md").read_text()


def untimed(summary: str) -> str:
    return re.sub(r"\| \d+ \|", "| S |", summary)


def test_no_stage_stops_the_next_and_a_later_call_goes_on(
    session: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "beside"
    monkeypatch.setattr(session, "BESIDE", (f"while sleep 0.05; do echo >> {beside}; done",))
    (tmp_path / "tests").write_text(TESTS)
    count = f"wc -l < {beside} > {tmp_path}"
    timed = f"sleep 0.3; {count}/a; sleep 0.5; {count}/b; echo '| 1 |'"
    made = stages(
        session,
        ("look", 60, "echo NVIDIA X, 1 GiB", False),
        ("tests", 60, f"cat {tmp_path}/tests; false", False),
        ("hangs", 2, "sleep 60 & echo begun; wait", False),
        ("times", 60, f"{timed}; echo 'a warning'", True),
        ("long", 6000, "echo never", False),
        ("bundled", 1, "echo never", False, tmp_path / "absent"),
    )
    monkeypatch.setattr(session, "STAGES", made)
    summary = untimed(run(session, tmp_path / "out", "--minutes", "5"))
    assert "NVIDIA X, 1 GiB; an unnamed commit" in summary
    for line in (
        "| tests | failed | S | 1 passed, 1 failed, 1 skipped |",
        "| hangs | cut off | S | begun |",
        "| times | passed |",
        "| long | not run |",
        "| bundled | not run |",
        "* tests: FAILED tests/a.py::two - AssertionError",
    ):
        assert line in summary
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text(), (
        "somebody worked beside what is timed"
    )
    tables = (tmp_path / "out/tables.md").read_text()
    assert (
        "## times\n" in tables
        and "| 1 |\n" in tables
        and "\na warning" not in tables
        and "[gw0]" not in tables
    )
    with tarfile.open(tmp_path / "out/logs.tar.gz") as archive:
        assert "logs/tests.log" in archive.getnames()

    monkeypatch.setattr(session, "STAGES", (*made[:4], made[4]._replace(seconds=60)))
    before = json.loads((tmp_path / "kept/done.json").read_text())
    assert "| long | passed | S | never |" in untimed(run(session, tmp_path / "out", "--minutes", "5"))
    after = json.loads((tmp_path / "kept/done.json").read_text())
    assert after[:-1] == before, "what had run ran again"
    run(session, tmp_path / "out", "--minutes", "5", "--only", "look")
    assert json.loads((tmp_path / "kept/done.json").read_text())[0] != before[0]
    with pytest.raises(SystemExit, match="--only nothing: known are look, tests"):
        run(session, tmp_path / "out", "--only", "nothing")


def test_a_bundle_comes_in_two_calls(session: ModuleType) -> None:
    for part, text in (("1", "be"), ("2", "gun")):
        folder = session.LEASE / f"vllm{part}"
        folder.mkdir(parents=True)
        (folder / f"site.tar.xz.0{int(part) - 1}").write_text(text)
        session.settle()
    assert (session.VLLM / "site.tar.xz").read_text() == "begun"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "command",
    [
        "scripts/gpu_look.py",
        "scripts/gpu_storms.py",
        "scripts/gpu_sanitize.py",
        "benchmarks/gpu_models.py",
        "benchmarks/gpu_numbers.py",
        "benchmarks/gpu_engine.py",
        *(f"benchmarks/gpu_{name}.py" for name in ("recurrences", "attention", "dense", "launch")),
    ],
)
def test_without_a_gpu_a_stage_says_so_in_a_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.syspath_prepend(str((ROOT / command).parent))
    monkeypatch.setattr(sys, "argv", [command])
    with pytest.raises(SystemExit, match="torch finds no CUDA device here") as ended:
        runpy.run_path(str(ROOT / command), run_name="__main__")
    assert "\n" not in ended.value.code and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("op", ["mamba2", "delta"])
def test_a_layer_to_be_timed_is_what_the_kernels_tests_call(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made by a helper that had moved, with an argument that was gone: the stage ended at once."""
    pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("gpu_recurrences")
    for sizes in module.MODELS[op].values():
        layer = module.Layer(op, sizes | {"heads": 2, "groups": 1, "chunk_len": 16}, 3, 4, None)
        assert layer.device_rows.shape == (3, 8) and len(layer.tokens[0]) == 12
