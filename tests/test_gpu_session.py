"""The script that spends a GPU's minutes, on stages that need none; its own stages say that there is none."""

import importlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hemiola.plugins.gpu import launch
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.step.bucket import RULES, _rules_of

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
    for name in ("SITE", "ENGINES", "VLLM", "TRITON", "TOOL", "COMPILED", "PACKED"):
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
        "Not run: long, bundled",
        "* tests: FAILED tests/a.py::two - AssertionError",
        "* hangs: begun",
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


def test_what_a_stage_needs_may_come_while_others_run(
    session: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "BESIDE", ())
    bundle = tmp_path / "bundle"
    made = stages(
        session,
        ("bundled", 60, "echo unpacked", True, bundle),
        ("makes", 60, f"touch {bundle}"),
        ("fills", 10, "echo $STAGE_SECONDS", False, None, True),
    )
    monkeypatch.setattr(session, "STAGES", made)
    for seconds in (288, 108):  # what is left, but for a moment's patience
        summary = untimed(run(session, tmp_path / "out", "--minutes", str((seconds + 12) / 60)))
        assert "| bundled | passed | S | unpacked |" in summary
        filled = int(re.findall(r"fills \| passed \| S \| (\d+)", summary)[0])
        assert seconds - 20 < filled <= seconds + 12


def test_lanes_have_gpus_of_their_own_and_wait_for_what_they_need(
    session: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the first two ends when the other has begun; what has passed does not run again; what nobody
    makes is not waited for, and kept a lane from all that stood behind it."""
    built, met = tmp_path / "built", f"touch {tmp_path}/$CUDA_VISIBLE_DEVICES; until [ -e {tmp_path}"
    made = stages(
        session,
        ("one", 20, f"{met}/2 ]; do sleep 0.01; done; echo on $CUDA_VISIBLE_DEVICES", True),
        ("two", 20, f"{met}/0,1 ]; do sleep 0.01; done; taskset -cp $$", True),
        ("build", 20, f"sleep 0.3; touch {built}"),
        ("needs", 20, f"[ -e {built} ] && echo found", True, built, False, "build"),
        ("fails", 20, f"echo >> {tmp_path}/failed; echo because; false"),
        ("lost", 20, "echo never", True, tmp_path / "absent", False, "fails"),
        ("behind", 20, "echo here"),
        ("for ever", 60, "echo never"),
    )
    monkeypatch.setattr(session, "STAGES", made[:1])
    monkeypatch.setattr(session, "LANES", made[1:])
    monkeypatch.setattr(session, "BESIDE", ("echo never",))
    lanes = "--lanes", "one,needs,fails@0,1; two,lost,behind@2; build; for ever@3", "--minutes", str(35 / 60)
    summary = untimed(run(session, tmp_path / "out", *lanes))
    for line in ("one | passed | S | on 0,1", "needs | passed | S | found", "behind | passed | S | here"):
        assert f"| {line}" in summary
    assert "* fails: because" in summary
    assert f"| lost | failed | S | there is no {tmp_path}/absent, and nothing makes it |" in summary
    assert "for ever" not in summary and not (session.KEPT / "logs/beside.log").exists()
    assert re.search(r"\| two \| passed \| S \| pid .* affinity list: [\d,-]+ \|", summary)
    for path in (tmp_path / "0,1", tmp_path / "2"):
        path.unlink()
    run(session, tmp_path / "out", *lanes)
    assert not (tmp_path / "2").exists() and (tmp_path / "failed").read_text() == "\n\n"
    with pytest.raises(SystemExit, match="--lanes nothing: known are one, two"):
        run(session, tmp_path / "out", "--lanes", "nothing@0")


def test_our_tokens_stand_beside_vllms_of_the_same_session(session: ModuleType, tmp_path: Path) -> None:
    logs = session.KEPT / "logs"
    logs.mkdir(parents=True)
    peer = {"9b-off": {"decode b64": {"tok_s": 7615.8}, "end": {"rc": 0}}}
    (logs / "peer.json").write_text(json.dumps(peer))
    line = "| 9b | none | 64 | 8.94 | 1.44 | 8.40 | 0.94 | 7,158 | 103 | 0.4% | equal |\n"
    (logs / "models.log").write_text(line + line.replace("| 64 |", "| 1 |"))
    (logs / "two").mkdir()
    (logs / "two/peer.json").write_text(
        json.dumps({"9b-off": {"decode b64": {"tok_s": 10_000}, "decode b1": {"err": "x"}}})
    )
    (logs / "9b_ranks.log").write_text(line.replace("7,158", "14,316") + line.replace("| 64 |", "| 1 |"))
    session.PACKED.write_text("too large to come back with the logs")
    session.write(tmp_path)
    assert (tmp_path / session.PACKED.name).read_text() == session.PACKED.read_text()
    for name in ("summary.md", "tables.md"):
        text = (tmp_path / name).read_text()
        assert "| 9b | none | 64 | 7,158 | 7,616 | 0.94 | 1.2 |" in text and text.count("| 9b |") == 1
        assert "| 9b, two | none | 64 | 14,316 | 10,000 | 1.43 | 1.2 |" in text


def test_a_bundle_comes_in_two_calls(session: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's is unpacked then, once."""
    unpacked = []

    def unpack(packed: Path) -> None:
        unpacked.append(packed.read_text())
        (session.TRITON / "lib/python3.12/site-packages").mkdir(parents=True)

    monkeypatch.setattr(session, "unpack", unpack)
    for part, text in (("1", "be"), ("2", "gun")):
        for name, packed in (("vllm", "site.tar.xz"), ("triton", "triton.tar.xz")):
            folder = session.LEASE / f"{name}{part}"
            folder.mkdir(parents=True)
            (folder / f"{packed}.0{int(part) - 1}").write_text(text)
        session.settle()
    session.settle()
    assert (session.VLLM / "site.tar.xz").read_text() == "begun" and unpacked == ["begun"]


def test_a_tool_that_came_along_is_installed_once(session: ModuleType) -> None:
    """And the sanitizer waits for it: the machine's own is too old."""
    wheel = session.LEASE / "sanitizer/tool-1-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nvidia/cu13/bin/compute-sanitizer", "")
        archive.writestr("tool-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tool\nVersion: 1\n")
        archive.writestr(
            "tool-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tool-1.dist-info/RECORD", "")
    stage = next(stage for stage in session.STAGES if stage.name == "sanitizer")
    assert stage.needs and f"PATH={stage.needs}/cu13/bin:$PATH " in stage.command
    tool = session.KEPT / stage.needs.relative_to("/tmp/gpu_session") / "cu13/bin/compute-sanitizer"
    session.settle()
    assert tool.exists()
    tool.write_text("kept")
    session.settle()
    assert tool.read_text() == "kept"


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_lanes_ask_of_scripts_they_understand(
    session: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the line that says that there is no GPU."""
    pytest.importorskip("triton", reason="needs Triton")
    asked = []
    for stage in session.LANES:
        for command in re.findall(r"python3 ((?:scripts|benchmarks)/(?:'[^']*'|[^;'])*)", stage.command):
            if not any(word in command for word in ("--build", "report_003", "simulation", "disk_reads")):
                asked.append(shlex.split(command.replace("$((STAGE_SECONDS - 60))", "9")))
    for script, *arguments in {tuple(words) for words in asked}:
        monkeypatch.syspath_prepend(str((ROOT / script).parent))
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit, match=r"torch finds (no|0) CUDA devices? here"):
            runpy.run_path(str(ROOT / script), run_name="__main__")
    ranks = runpy.run_path(str(ROOT / "scripts/gpu_ranks.py"))
    for words in (words for words in asked if words[0].endswith("gpu_ranks.py")):
        assert {*words[words.index("--parts") + 1].split(",")} <= ranks["PARTS"].keys()
        cases = words[words.index("--cases") + 1].split(";") if "--cases" in words else []
        assert {*cases} <= ranks["CASES"].keys() | {"killed"}


def test_the_lanes_of_the_document_are_lanes_with_gpus_enough(session: ModuleType) -> None:
    """Ranks were to be built where one GPU of two was seen."""
    asked = re.findall(r'--lanes "([^"]+)"', (ROOT / "CONTRIBUTING.md").read_text())
    lanes = [lane for text in asked for lane in session.lanes_of(text)]
    assert lanes
    for lane in lanes:
        for stage in lane.stages:
            ranks = [int(num) for num in re.findall(r"--tp (\d)", stage.command)]
            ranks += [2 for word in ("gpu_ranks", "gpu_report_003") if word in stage.command and not ranks]
            num_gpus = len(lane.gpus.split(",")) if lane.gpus else 4
            assert num_gpus >= max(ranks, default=1), stage.name


def test_a_part_that_is_interrupted_leaves_no_process_on_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on in a group of its own, beside the next stage."""
    (tmp_path / "part.py").write_text("import time\n\ntime.sleep(60)\n")
    begun: list[subprocess.Popen] = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            if not begun:
                begun.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    ran = runpy.run_path(str(ROOT / "scripts/gpu_ranks.py"))["ran"]
    monkeypatch.setitem(ran.__globals__, "__file__", str(tmp_path / "part.py"))
    asked = SimpleNamespace(tp=2, folder=tmp_path, seconds=1, sums=1, families="", cases="")
    with pytest.raises(KeyboardInterrupt):
        ran("sums", asked)
    status = begun[0].poll()
    begun[0].kill()
    assert status == -signal.SIGKILL


def test_every_kind_of_rules_that_has_graphs_is_asked_for() -> None:
    """None sorted, so the stage "buckets" would have found graphs that nothing used."""
    mixes = runpy.run_path(str(ROOT / "scripts/gpu_ranks.py"))["MIXES"]
    firsts = [Rule(SamplingParams(**{"temperature": 0.0, **mix[0]}), 0, 17, frozenset()) for mix in mixes]
    assert {_rules_of([SimpleNamespace(rule=rule, guide=None)]) for rule in firsts} == {*RULES}


BENCH = """
import json, os
from types import SimpleNamespace

def env_setup(v2):
    assert v2 == 0 and json.loads(os.environ["PEER_EXTRA"])["quantization"] == "fp8"

class Run:
    def __init__(self, name, rows):
        assert (name, rows) == ("35b-mtp3", os.environ["PEER_WORK"] + "/report.jsonl")
        self.eng, self.engine_core, self.left, self.num = self, self, {}, 0

    def shutdown(self):
        print("ended")

    def prompt(self, num):
        return [0] * num

    def add(self, prompt, num):
        assert len(prompt) == 4400 and len(self.left) < 16
        self.num += 1
        self.left[f"r{self.num}"] = num
        return f"r{self.num}"

    def step(self):
        for name in [*self.left]:
            self.left[name] -= 2
            output = SimpleNamespace(token_ids=[0, 0])
            yield SimpleNamespace(request_id=name, outputs=[output], finished=not self.left[name])
            if not self.left[name]:
                del self.left[name]
"""


def test_vllm_has_report_003s_load(session: ModuleType, tmp_path: Path) -> None:
    """By the stage's own command."""
    stage = next(stage for stage in session.LANES if stage.name == "vllm report one")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/bench.py").write_text(BENCH)
    (tmp_path / "work/vcache").mkdir(parents=True)
    command = stage.command.replace("/tmp/gpu_session/vllm", str(tmp_path))
    command = command.replace(" python3 ", f" {sys.executable} ")
    seen = os.environ | {"OUT": str(tmp_path), "STAGE_SECONDS": "60"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env=seen)
    assert done.returncode == 0, done.stderr
    warm, found, ended = done.stdout.splitlines()
    assert "16 of 16 requests" in warm and "128 of 128 requests" in found and "tokens/s, TPOT 0.0" in found
    assert ended == "ended"


@pytest.mark.parametrize("op", ["mamba2", "delta"])
def test_a_layer_to_be_timed_is_what_the_kernels_tests_call(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made by a helper that had moved, with an argument that was gone: the stage ended at once."""
    pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("gpu_recurrences")
    for sizes in module.MODELS[op].values():
        layer = module.Layer(op, sizes | {"heads": 2, "groups": 1, "chunk_len": 16}, 3, 4, None)
        assert layer.device_rows.shape == (3, 8) and len(layer.tokens[0]) == 12


def test_models_are_measured_as_far_as_a_cpu_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that moved, or a number that nobody counts any more, would end the stage."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    models = importlib.import_module("gpu_models")
    small = {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 100_000,
        "eos_token_id": 1,
    }
    config = json.loads((models.CONFIGS / "qwen3.5-0.8b/config.json").read_text()) | small
    (tmp_path / "qwen3.5-0.8b").mkdir()
    (tmp_path / "qwen3.5-0.8b/config.json").write_text(json.dumps(config))
    lengths = {"PROMPT_LEN": 150, "SHARED_LEN": 300, "TAIL_LEN": 20}
    for name, value in {"CONFIGS": tmp_path, "arch_here": lambda: "cpu", **lengths}.items():
        monkeypatch.setattr(models, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "CPU")
    engines = ["--engines", str(tmp_path / "engines"), "--context", "64"]
    asked = ["--models", "0.8b/32k", "--rows", "2", "--drafts", "none,adaptive", "--prompts"]
    for more in (["--build"], []):
        monkeypatch.setattr(sys, "argv", ["gpu_models.py", *engines, *asked, *more])
        models.main()
    said = capsys.readouterr().out
    lines = [line.split(" | ") for line in said.splitlines() if line.endswith(" | equal |")]
    steps = [[line[1], *map(int, line[8].split("-"))] for line in lines[:4]]
    assert steps == [[kind, *phase] for kind in ("none", "adaptive") for phase in models.PHASES]
    assert len(lines) == 8 and "OTHER" not in said and said.count(": ready after") == 2
    assert all(0 <= float(line[9].removesuffix("%")) < 100 for line in lines[:4])


@pytest.mark.parametrize(
    ("command", "kernels"),
    [
        ("gpu_attention.py --models 30B-A3B --pages auto --prefill 640", ("_write", "_attend", "_join")),
        ("gpu_dense.py small,conv", ("norm._norm", "gate._gate", "rope._rope", "route._route", "conv._conv")),
    ],
)
def test_a_benchmark_of_kernels_calls_them_as_they_are(command: str, kernels: tuple[str, ...]) -> None:
    """An op had two more arguments: the stage would have ended there, on the only minutes of a GPU."""
    pytest.importorskip("triton", reason="needs Triton")
    rehearse = [sys.executable, "scripts/gpu_rehearse.py", *f"benchmarks/{command}".split()]
    seen = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    done = subprocess.run(rehearse, capture_output=True, text=True, cwd=ROOT, env=seen)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    assert said.startswith("rehearsed: ") and all(name in said for name in kernels)


def test_a_kernel_that_begins_while_another_runs_is_alone_for_its_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    profiles = importlib.import_module("gpu_profile")
    runs = [("_tiles", 0, 10), ("_norm", 8, 12), ("_tiles", 14, 20), ("_norm", 500, 503), ("_gate", 501, 502)]
    sums, gaps = profiles.summed([profiles.Kernel(*run) for run in runs])
    assert gaps == 2  # that of 480 is between steps
    assert {name: tuple(found) for name, found in sums.items()} == {
        "_tiles": (2, 16, 16),
        "_norm": (2, 7, 5),
        "_gate": (1, 1, 0),
    }
    profiles.table("a step", [profiles.Kernel(*run) for run in runs], 2)
    said = capsys.readouterr().out
    assert "| **dense** | 1.0 | 8.0 | 0.008 | 0.008 |" in said and "| gaps | | | | 0.001 |" in said


def test_gaps_stand_by_the_kernels_around_them_however_long_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    profiles = importlib.import_module("gpu_profile")
    runs = [("_norm", -9, -8), ("_fill", 0, 1), ("_sum", 1, 90), ("_gate", 5, 6), ("_norm", 390, 400)]
    runs += [("_fill", 1000, 1001), ("_sum", 1001, 1090), ("_norm", 1190, 1200), ("_fill", 2000, 2001)]
    kernels, num_steps = profiles.whole_steps([profiles.Kernel(*run) for run in runs[::-1]])
    assert [kernel.start for kernel in kernels] == [0, 1, 5, 390, 1000, 1001, 1190] and num_steps == 2
    assert {tuple(where): (gap.count, gap.took) for where, gap in profiles.gaps_of(kernels).items()} == {
        ("_sum", "_norm"): (2, 400),
        ("_norm", "_fill"): (1, 600),
    }
    profiles.table("a step", kernels, num_steps)
    assert "| _sum | _norm | 1.0 | 200.0 | 0.200 |" in capsys.readouterr().out


def test_a_profile_is_of_steps_in_which_all_rows_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one of a process begins a second late: report 003's saw the last rows of sixteen end."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    profiles, models = (importlib.import_module(name) for name in ("gpu_profile", "gpu_models"))
    told: list[str] = []
    running = iter((16, 3))

    @contextmanager
    def profile(activities: object) -> Iterator[SimpleNamespace]:
        told.append("profiler")
        yield SimpleNamespace(events=list)

    def begun(llm: object, prompts: object, num_tokens: int) -> SimpleNamespace:
        told.append(f"{num_tokens} tokens")
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(profiles, "profile", profile)
    monkeypatch.setattr(profiles, "SECONDS", 0)
    monkeypatch.setattr(models, "decode", lambda *given: None)
    monkeypatch.setattr(models, "begun", begun)
    llm = SimpleNamespace(
        config=SimpleNamespace(max_len=100), load=lambda: SimpleNamespace(num_running=next(running))
    )
    profiles.decode(llm, [[1] * 40, [1] * 30], "a step")
    assert told == ["profiler", "60 tokens", "profiler"]
    assert "a step (16 rows ran, then 3; nan ms)" in capsys.readouterr().out


def test_a_kernel_has_the_name_of_its_launch_and_not_that_of_one_that_was_unloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt's table had 32 dense layers among the scans of an engine that was closed."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    profiles = importlib.import_module("gpu_profile")
    dense, scan = (launch.Kernel("linear", "_persistent"), launch.Kernel("delta", "_scan"))
    with launch.launches(lambda *given: None), profiles.launched() as names:
        for kernel, grid in ((dense, (3,)), (scan, (0, 2)), (scan, (1,)), (dense, (8, 1))):
            kernel[grid](1, SIZE=2)
    assert names == ["_persistent", "_scan", "_persistent"]
    runs = [("_scan", 7, 9), ("at::native::copy", 1, 2), ("_persistent", 0, 3), ("_scan", 4, 5)]
    seen = [profiles.Kernel(*run) for run in runs]
    mine = [kernel.name for kernel in profiles.renamed(seen, names)]
    assert mine == ["_persistent", "at::native::copy", "_persistent", "_scan"]
    assert profiles.renamed(seen, names[:2]) == seen, "some were a graph's"


def test_tritonserver_is_unpacked_and_finds_the_packages_of_the_machine(
    session: ModuleType, tmp_path: Path
) -> None:
    """The archive is unpacked at /, over nothing that is there."""
    home, mine = tmp_path / "packed/triton/lib/python3.12/site-packages", tmp_path / "mine"
    home.mkdir(parents=True)
    (home / "numpy.py").write_text("")
    mine.write_text("theirs")
    packed = session.KEPT / "triton.tar.xz"  # joined of what two calls brought
    packed.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(packed, "w:xz") as archive:
        archive.add(home.parents[2], session.TRITON)
        archive.add(mine, mine)
    mine.write_text("ours")
    session.settle()
    assert mine.read_text() == "ours"
    found = session.TRITON / "lib/python3.12/site-packages"
    assert (found / "numpy.py").exists()
    assert str(Path(pytest.__file__).parents[1]) in (found / "machine.pth").read_text().splitlines()
