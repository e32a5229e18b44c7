"""All that a GPU machine is asked, in order of worth, within some minutes: tests, then benchmarks.

    python3 scripts/gpu_session.py --out DIR [--minutes 9] [--only engines,models]

Stages run one after the other, each with a time limit and a log of its own, and none stops the next. What
only needs a CPU runs beside them, and is paused while something is timed. A later call goes on where this one
ended; --only runs what it names, again or not. In DIR: summary.md, tables.md (of the benchmarks, with device,
commit and date; the text of benchmarks/gpu_session.md), logs.tar.gz.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEASE = ROOT / ".lease"  # what scripts/gpu_prepare.sh made, and the calls carry
KEPT = Path("/tmp/gpu_session")  # of this machine, for later calls
SITE, ENGINES, VLLM = KEPT / "site", KEPT / "engines", KEPT / "vllm"
ENOUGH = 0.6  # of its time; with less left no stage begins, but one behind it may
PATIENCE = 12  # seconds in which an interrupted stage may say what it has
PYTEST = "python3 -m pytest -v --tb=short -p no:cacheprovider -n 14 --dist load"
RECURRENCES = "python3 benchmarks/gpu_recurrences.py --bench --ops mamba2 delta --chunks 16"
MODELS = f"python3 benchmarks/gpu_models.py --engines {ENGINES}"


class Stage(NamedTuple):
    name: str
    seconds: int  # at most
    command: str
    is_timed: bool = False  # nothing else may run meanwhile
    needs: Path | None = None  # what must be there: it came along, or is made beside the stages


STAGES = (
    Stage("look", 60, "python3 scripts/gpu_look.py", True),
    Stage("kernels", 150, f"{PYTEST} tests/plugins/*/test_triton.py"),
    Stage("engines", 200, f"{PYTEST} tests/gpu --ignore tests/gpu/test_tensorrt.py"),
    Stage("models", 200, f"{MODELS} --models 9b,0.8b --rows 1,64", True),
    Stage("matrix", 240, f"TEST_DEVICE=cuda {PYTEST} tests/runtime/engine/test_matrix*.py"
          " tests/runtime/engine/test_reports.py tests/runtime/engine/test_engine_storms.py"
          " tests/runtime/engine/drafts/test_reduced_head.py"),
    Stage("tensorrt", 150, f"{PYTEST} tests/gpu/test_tensorrt.py tests/plugins/gpu/test_ptx.py"),
    Stage("numbers", 90, "python3 benchmarks/gpu_numbers.py", True),
    Stage("prompts", 90, f"{MODELS} --models 9b --rows '' --prompts", True),
    Stage("recurrences", 120, RECURRENCES, True),
    Stage("storms", 200, "python3 scripts/gpu_storms.py --seconds 130 --processes 14"),
    Stage("vllm", 300, f"PYTHONPATH={VLLM}/site PEER_SITE={VLLM}/site PEER_WORK={VLLM}/work python3"
          f" {VLLM}/bench/bench.py --budget 290 --configs 9b-off,9b-mtp3,0.8b-mtp3", True,
          VLLM / "site/.peer_sum"),
    Stage("sanitizer", 200, "python3 scripts/gpu_sanitize.py --seconds 180"),
    Stage("fewer ids", 150, f"{MODELS} --models 9b/32k,0.8b/32k --rows 1,64 --drafts none,mtp", True),
    Stage("more models", 240, f"{MODELS} --models nano,30b --rows 1,8,64", True),
    Stage("many rows", 200, f"{MODELS} --models 9b,0.8b --rows 8,256", True),
    Stage("demos", 120, "python3 benchmarks/gpu_engine.py", True),
    Stage("launches", 60, "python3 benchmarks/gpu_launch.py", True),
    Stage("attention", 120, "python3 benchmarks/gpu_attention.py --prefill 8192", True),
    Stage("dense", 180, "python3 benchmarks/gpu_dense.py", True),
)  # fmt: skip
# Beside the stages, one after the other.
BESIDE = (
    f"{MODELS} --models 9b,0.8b --rows 64 --build",
    f"[ ! -f {VLLM}/site.tar.xz ] || PEER_SITE={VLLM}/site PEER_WORK={VLLM}/work bash {VLLM}/install.sh",
    f"{MODELS} --models nano,30b --rows 64 --build",
    f"{MODELS} --models 9b,0.8b --rows 256 --build",
)


class Done(NamedTuple):
    name: str
    how: str  # passed | failed | cut off | out of time, of the call
    seconds: float
    said: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.2)
    parser.add_argument("--only", default="", help=", ".join(stage.name for stage in STAGES))
    asked = parser.parse_args()
    named = [name.strip() for name in asked.only.split(",") if name.strip()]
    if unknown := set(named) - {stage.name for stage in STAGES}:
        sys.exit(f"--only {', '.join(unknown)}: known are {', '.join(stage.name for stage in STAGES)}")
    until = time.monotonic() + 60 * asked.minutes
    asked.out.mkdir(parents=True, exist_ok=True)
    (KEPT / "logs").mkdir(parents=True, exist_ok=True)
    settle()
    environment = environment_of()
    meanwhile = "; ".join(("renice -n 19 $$ > /dev/null", *BESIDE))
    beside = begin(meanwhile, KEPT / "logs/beside.log", environment)
    try:
        for stage in STAGES:
            left = until - time.monotonic()
            if stage.needs and not stage.needs.exists():
                continue
            if not (stage.name in named if named else is_open(stage)) or left < ENOUGH * stage.seconds:
                continue
            done = run(stage, min(stage.seconds, left), beside, environment)
            save([*(other for other in load() if other.name != done.name), done])
            write(asked.out)
            print(f"{done.name}: {done.how}, {done.seconds:.0f} s, {done.said}", flush=True)
            if done.name == "look" and done.how != "passed":
                sys.exit("there is nothing to run on")
    finally:
        stop(beside, 1)
        write(asked.out)
        print((asked.out / "summary.md").read_text(), flush=True)


def is_open(stage: Stage) -> bool:
    """Never run, or not for its time."""
    return all(done.name != stage.name or done.how == "out of time" for done in load())


def settle() -> None:
    """Unpack what came along; a bundle comes in parts, one a call."""
    wheels = sorted((LEASE / "base/whl").glob("*.whl"))
    if wheels and not SITE.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", str(SITE), *map(str, wheels)], check=True)
    for part in sorted(LEASE.glob("vllm*")):
        shutil.copytree(part, VLLM, dirs_exist_ok=True)
    parts = sorted(VLLM.glob("site.tar.xz.*"))
    if len(parts) == 2 and not (VLLM / "site.tar.xz").exists():
        (VLLM / "site.tar.xz").write_bytes(b"".join(part.read_bytes() for part in parts))


def environment_of() -> dict[str, str]:
    """What stages see."""
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests", SITE)))
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    own = {"PYTHONPATH": folders, "PYTHONUNBUFFERED": "1", "GPU_ENGINES": str(ENGINES)}
    return os.environ | threads | own | {"OUT": str(KEPT / "logs"), "PYTHONDONTWRITEBYTECODE": "1"}


def begin(command: str, log: Path, environment: dict[str, str]) -> subprocess.Popen:
    """A group of processes of its own, so that all of it can be paused and ended."""
    with log.open("a") as file:
        file.write(f"$ {command}\n")
        file.flush()
        shell = ["bash", "-c", command]
        return subprocess.Popen(
            shell, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def run(stage: Stage, seconds: float, beside: subprocess.Popen, environment: dict[str, str]) -> Done:
    log = log_file(stage.name)
    log.unlink(missing_ok=True)
    print(f"{stage.name}: at most {seconds:.0f} s", flush=True)
    start = time.monotonic()
    if stage.is_timed:
        tell(beside, signal.SIGSTOP)
    process = begin(stage.command, log, environment)
    try:
        code = process.wait(seconds - PATIENCE if seconds > 2 * PATIENCE else seconds)
    except subprocess.TimeoutExpired:
        code = None
        tell(process, signal.SIGINT)
    stop(process, PATIENCE)
    tell(beside, signal.SIGCONT)
    cut = "cut off" if seconds >= stage.seconds else "out of time"
    how = cut if code is None else "failed" if code else "passed"
    return Done(stage.name, how, time.monotonic() - start, gist(log.read_text(errors="replace")))


def tell(process: subprocess.Popen, word: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, word)


def stop(process: subprocess.Popen, patience: float) -> None:
    """End whatever is left of a group."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    tell(process, signal.SIGKILL)
    process.wait()


def gist(log: str) -> str:
    """How many tests did what, if any ran; else the last line."""
    outcomes = re.findall(r"^\[gw\d+\].* (PASSED|FAILED|ERROR|SKIPPED|XFAIL) ", log, re.MULTILINE)
    if outcomes:
        return ", ".join(f"{outcomes.count(word)} {word.lower()}" for word in dict.fromkeys(outcomes))
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "said nothing"


def load() -> list[Done]:
    found = KEPT / "done.json"
    return [Done(*fields) for fields in json.loads(found.read_text())] if found.exists() else []


def save(done: list[Done]) -> None:
    order = [stage.name for stage in STAGES]
    (KEPT / "done.json").write_text(json.dumps(sorted(done, key=lambda one: order.index(one.name))))


def write(out: Path) -> None:
    """What is known by now: a lease may end at any moment."""
    known = {done.name: done for done in load()}
    lines = [f"{where()}", "", "| stage | | seconds | |", "|---|---|---|---|"]
    for stage in STAGES:
        done = known.get(stage.name, Done(stage.name, "not run", 0.0, ""))
        said = done.said.replace("|", "/")
        lines.append(f"| {done.name} | {done.how} | {done.seconds:.0f} | {said} |")
    for done in known.values():
        lines += [f"* {done.name}: {line}" for line in bad(done.name)[:12]]
    (out / "summary.md").write_text("\n".join(lines) + "\n")
    tables = [f"# Benchmarks of one session on a GPU\n\n{where()}\n"]
    for stage in STAGES:
        if stage.name in known and (found := table_of(stage.name)):
            tables.append(f"## {stage.name}\n`{stage.command}`: {known[stage.name].how}\n\n{found}\n")
    (out / "tables.md").write_text("\n".join(tables))
    with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
        archive.add(KEPT / "logs", "logs")


def log_file(name: str) -> Path:
    return KEPT / "logs" / f"{name.replace(' ', '_')}.log"


def log_of(name: str) -> str:
    path = log_file(name)
    return path.read_text(errors="replace") if path.exists() else ""


def bad(name: str) -> list[str]:
    """Tests that failed, and lines in which a benchmark says that something differs."""
    found = re.findall(r"^(?:FAILED|ERROR) .*|^.*OTHER (?:TOKENS|BITS).*", log_of(name), re.MULTILINE)
    return [line[:200] for line in dict.fromkeys(found)]


def table_of(name: str) -> str:
    """The lines of a benchmark that belong into a document; warnings of others do not."""
    lines = log_of(name).splitlines()[1:]
    is_test = any(re.match(r"=+ test session starts", line) for line in lines)
    return "" if is_test else "\n".join(line for line in lines if line.startswith(("|", "#", "NVIDIA", "*")))


def where() -> str:
    """Device, commit, date."""
    named = LEASE / "base/commit"
    commit = named.read_text().strip() if named.exists() else "an unnamed commit"
    device = next((line for line in log_of("look").splitlines() if line.startswith("NVIDIA")), "no GPU")
    return f"{device}; {commit}; {time.strftime('%Y-%m-%d %H:%M')}"


if __name__ == "__main__":
    main()
