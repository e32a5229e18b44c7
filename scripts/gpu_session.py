"""All that a GPU machine is asked, in order of worth, within some minutes: tests, then benchmarks.

    python3 scripts/gpu_session.py --out DIR [--minutes 9] [--only engines,models]

Stages run one after the other, each with a time limit and a log of its own, and none stops the next. What
only needs a CPU runs beside them, and is paused while something is timed. A later call goes on where this one
ended; --only runs what it names, again or not. Storms of new seeds take what time is left. In DIR: summary.md
(which is printed, too), tables.md (of the benchmarks, with device, commit and date; the text of
benchmarks/gpu_session.md), logs.tar.gz.

Thirty minutes of a machine, its start (1 to 2) and the transfers taken off, are three calls; the seconds are
those that stages took on 2026-11-22, or (~) what their parts let expect:

    --minutes 9.3 with .lease/base, .lease/vllm1: look 6, engines 103, kernels 145, matrix 148, models 46,
        numbers 22, prompts 26 (496 of 558)
    --minutes 9.3 with .lease/vllm2: storms 134 (the bundle is installed beside them), vllm 255,
        many rows ~90 (479 of 558)
    --minutes 7.7 with .lease/sanitizer: more models ~90, sanitizer 184, fewer ids 45, adaptive 72,
        more rows 39 (430 of 462)
    --minutes 2.7 --only look,serve with .lease/triton2 (28 MiB: nothing else fits; .lease/triton1, 2 MiB,
        came with a call before): 4, 52; with --minutes 4.2 --only look,serve,commands 77 more

A machine goes back 30 s after a call, and with it what calls have left there: ask for the next at once. A
model is new to vLLM for 100 s (without drafts first: with them it took more than its 150).
What is behind these in the list comes in another session. gpu_prepare.sh names the commit for the tables:
run it again before the first call. Where a round over branches comes first, fewer calls are left.

On a machine with several GPUs, --lanes "report,buckets@0,1; codes@2; build report,build ranks" runs
sequences of stages beside each other, each with GPUs (or none: it builds) and a share of the cores of its
own. A stage waits for what it needs as long as a lane is to make it. CONTRIBUTING.md has the calls.
"""

import argparse
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEASE = ROOT / ".lease"  # what scripts/gpu_prepare.sh made, and the calls carry
KEPT = Path("/tmp/gpu_session")  # of this machine, for later calls
SITE, ENGINES, VLLM, TRITON, TOOL = (KEPT / name for name in ("site", "engines", "vllm", "triton", "tool"))
COMPILED = KEPT / "compiled"  # Triton's cache
PACKED = KEPT / "compiled.tar.xz"  # the same, to be carried to another machine
ENOUGH = 0.6  # of its time; with less left no stage begins, but one behind it may
PATIENCE = 12  # seconds in which an interrupted stage may say what it has
ONE_BY_ONE = "-m pytest -v --tb=short -p no:cacheprovider"
PYTEST = f"python3 {ONE_BY_ONE} -n 14 --dist worksteal"
# Without that machine's plugins, which load what cannot do with numpy 1.
PLUGINS = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", "-p pytest_timeout -p _hypothesis_pytestplugin"
SERVE = f"{PLUGINS[0]} {TRITON}/bin/python3 {ONE_BY_ONE} {PLUGINS[1]}"
RECURRENCES = "python3 benchmarks/gpu_recurrences.py --bench --ops mamba2 delta --chunks 16"
MODELS = f"python3 benchmarks/gpu_models.py --engines {ENGINES}"
STORMS = "python3 scripts/gpu_storms.py --seed $(date +%s) --seconds $((STAGE_SECONDS - 5))"
PEER = (
    f"TRITON_CACHE_DIR={VLLM}/triton PYTHONPATH={VLLM}/site PEER_SITE={VLLM}/site PEER_WORK={VLLM}/work"
    f" python3 {VLLM}/bench/bench.py --budget $STAGE_SECONDS"
)
RANKED = KEPT / "ranked"  # engines of gpu_ranks.py
RANKS = f"python3 scripts/gpu_ranks.py --folder {RANKED}"
REPORT = f"python3 benchmarks/gpu_report_003.py --engines {ENGINES}"
CODES = "python3 benchmarks/gpu_quantised.py"
CODED = "--models 9b/fp8,9b/int4,9b/nvfp4 --rows 1,64 --context 1024"
HEADED = CODED.replace("9b/fp8,9b/int4,9b/nvfp4", "9b/int4/head-int4,9b/fp8/head-fp8")
PRINTED = 7_000  # characters of the summary: a call brings back 12,000 of all that was printed


class Stage(NamedTuple):
    name: str
    seconds: int  # at most; the command finds what it has in STAGE_SECONDS
    command: str
    is_timed: bool = False  # nothing else may run meanwhile
    needs: Path | None = None  # what must be there: it came along, or is made beside the stages
    again: bool = False  # in every call
    maker: str = ""  # stage that makes what is needed, in lanes


STAGES = (
    Stage("look", 30, "python3 scripts/gpu_look.py", True),
    Stage("engines", 200, f"{PYTEST} tests/gpu --ignore tests/gpu/test_tensorrt.py -m 'not more'"),
    Stage("kernels", 170, f"{PYTEST} tests/plugins/*/test_triton.py tests/plugins/test_recurrences_triton.py"
          " tests/plugins/gpu/test_{clock,overlap}.py tests/plugins/step/test_forms.py"),
    # the last ones first: what ended for its time had not come so far
    Stage("codes", 200, f"{PYTEST} tests/plugins/{{moe,linear}}/test_{{e4m3,coded}}.py"),
    Stage("narrow", 220, f"{PYTEST} tests/plugins/attention/test_triton.py -k narrow_pages"),
    Stage("matrix", 260, f"TEST_DEVICE=cuda {PYTEST} tests/runtime/engine/test_matrix*.py"
          " tests/runtime/engine/test_reports.py tests/runtime/engine/test_engine_storms.py"
          " tests/runtime/step/test_reduced_head.py"),
    Stage("models", 110, f"{MODELS} --models 9b,0.8b --rows 1,64", True),
    Stage("numbers", 60, "python3 benchmarks/gpu_numbers.py", True),
    Stage("prompts", 60, f"{MODELS} --models 9b --rows '' --prompts", True),
    Stage("profile", 90, f"python3 benchmarks/gpu_profile.py --engines {ENGINES} --rows 1,64", True),
    Stage("storms", 150, STORMS),
    Stage("vllm", 300, f"{PEER} --configs 9b-off,9b-mtp3", True, VLLM / "site/.peer_sum"),
    Stage("many rows", 120, f"{MODELS} --models 9b --rows 8,256", True),
    Stage("more models", 200, f"{MODELS} --models 30b --rows 1,8,64; {MODELS} --models nano --rows 1,64,256",
          True),
    Stage("sanitizer", 260, f"PATH={TOOL}/nvidia/cu13/bin:$PATH"
          " python3 scripts/gpu_sanitize.py --seconds $((STAGE_SECONDS - 8))", needs=TOOL / "nvidia"),
    Stage("fewer ids", 120, f"{MODELS} --models 9b/32k,0.8b/32k --rows 1,64 --drafts none,mtp", True),
    Stage("adaptive", 90, f"{MODELS} --models 9b,0.8b --rows 1,64 --drafts none,adaptive", True),
    Stage("serve", 140, f"{SERVE} --timeout 100 tests/gpu/test_serving.py", needs=TRITON / "bin/python3"),
    Stage("commands", 90, f"PATH={TRITON}/bin:$PATH bash scripts/gpu_commands.sh"),  # there if carried
    Stage("more rows", 100, f"{MODELS} --models 0.8b --rows 8,256", True),
    Stage("more vllm", 330, f"{PEER} --configs 0.8b-off,0.8b-mtp3,nano9b-off", True, VLLM / "site/.peer_sum"),
    Stage("recurrences", 60, RECURRENCES, True),
    Stage("tensorrt", 90, f"{PYTEST} tests/gpu/test_tensorrt.py tests/builder/targets/trt/test_ptx.py"),
    Stage("more engines", 120, f"{PYTEST} tests/gpu -m more"),
    Stage("vllm exact", 170, f"mkdir -p $OUT/exact; OUT=$OUT/exact VLLM_BATCH_INVARIANT=1 {PEER} --again"
          " --configs 9b-off", True, VLLM / "site/.peer_sum"),
    Stage("attention", 120, "python3 benchmarks/gpu_attention.py --prefill 8192", True),
    Stage("dense", 180, "python3 benchmarks/gpu_dense.py", True),
    Stage("demos", 120, "python3 benchmarks/gpu_engine.py", True),
    Stage("launches", 30, "python3 benchmarks/gpu_launch.py", True),
    Stage("more storms", 60, STORMS, again=True),
)  # fmt: skip


def engine(name: str) -> Path:
    """Of which a stage waits for the last file."""
    return ENGINES / name / "manifest.json"


def theirs(name: str, configs: str, **extra: object) -> str:
    """vLLM with other options than in the stage "vllm", in a folder of its own. No configs: report 003."""
    work = VLLM / name
    begin = f"mkdir -p {work} $OUT/{name}; cp -rn {VLLM}/work/vcache {work}/; OUT=$OUT/{name}"
    peer = PEER.replace(f"PEER_WORK={VLLM}/work", f"PEER_WORK={work} PEER_BATCHES=1,64")
    if not configs:
        peer = f"{peer.partition(' python3')[0]} python3 benchmarks/peer_report_003.py {VLLM}/bench"
    return f"{begin} PEER_EXTRA='{json.dumps(extra)}' {peer}{f' --configs {configs}' if configs else ''}"


OF_VLLM: dict[str, Any] = {"is_timed": True, "needs": VLLM / "site/.peer_sum", "maker": "unpack vllm"}
TWO_DRAFTS = {  # report 003's
    "method": "mtp",
    "num_speculative_tokens": 2,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.857, 0.71],
}
SIXTEEN = {
    "quantization": "fp8",
    "speculative_config": TWO_DRAFTS,
    "compilation_config": {"cudagraph_capture_sizes": [3 * 2**n for n in range(9)]},  # three tokens a row
}
NO_GPU = "CUDA_VISIBLE_DEVICES="
BUILT = {tp: RANKED / f"built-{tp}" for tp in (2, 4)}
# In lanes, or by name.
LANES = (
    Stage("build report", 250, f"{NO_GPU} {REPORT} --build; {NO_GPU} {REPORT} --build --tp 1"),
    Stage("build ranks", 250, f"{RANKS} --parts build --cases mtp"),
    Stage("build codes", 300, f"{NO_GPU} {MODELS} {CODED} --build; {NO_GPU} {MODELS} {HEADED} --build"),
    Stage("build 9b ranks", 150, f"{NO_GPU} {MODELS} --models 9b --rows 64 --tp 2 --build"),
    Stage("build four", 250, f"{RANKS} --tp 4 --parts build --families moe-fp8 --cases mtp;"
          f" {NO_GPU} {MODELS} --models 9b --rows 64 --tp 4 --build"),
    Stage("build served", 150, "python3 -c 'from kit.gpu_engines import build_served; build_served()'"),
    Stage("compiled", 60, f"XZ_OPT=-T0 tar -C {KEPT} --exclude=*.{{ttir,ttgir,llir,source}}"
          f" -cJf {PACKED}.part {COMPILED.name} || [ $? = 1 ] && mv {PACKED}.part {PACKED}"),  # 1: it grows
    Stage("unpack vllm", 200, f"PEER_SITE={VLLM}/site PEER_WORK={VLLM}/work bash {VLLM}/install.sh",
          needs=VLLM / "site.tar.xz"),
    Stage("report", 230, f"{REPORT} --requests 320 --profile", True, engine("report-003-fp8-16-2"),
          maker="build report"),
    Stage("report one", 150, f"{REPORT} --requests 64 --profile --tp 1", True, engine("report-003-fp8-16-1"),
          maker="build report"),
    Stage("buckets", 240, f"{RANKS} --parts buckets", needs=BUILT[2], maker="build ranks"),
    Stage("mixture", 120, f"{RANKS} --parts engines --families moe-fp8"
          " --cases 'mtp;none;no graphs;mtp, chunks of 63'", needs=BUILT[2], maker="build ranks"),
    Stage("rank storms", 240, f"{RANKS} --parts storms --families nemotron-h-code,moe-fp8,qwen3.5-code"
          " --seconds $((STAGE_SECONDS - 60))", needs=BUILT[2], maker="build ranks"),
    Stage("9b ranks", 120, f"{MODELS} --models 9b --rows 1,64 --drafts none,mtp --tp 2", True,
          engine("9b-64-3072-2"), maker="build 9b ranks"),
    Stage("four", 240, f"{RANKS} --tp 4 --parts links,sums,engines --families moe-fp8 --sums 100000"
          " --cases 'mtp;none'", needs=BUILT[4], maker="build four"),
    Stage("four times", 120, f"{RANKS} --tp 4 --parts times;"
          f" {MODELS} --models 9b --rows 1,64 --drafts none,mtp --tp 4", True, engine("9b-64-3072-4"),
          maker="build four"),
    Stage("drafts of codes", 150, f"{MODELS} {CODED} --drafts none,mtp", True, engine("9b-nvfp4-64-2048-1"),
          maker="build codes"),
    Stage("coded", 150, f"{CODES} tiles --kinds fp8 --inner 256,512 --rows 16,48,4400;"
          f" {CODES} sweep --kinds nvfp4 --rows 1,4 --shapes up,down,out", True),
    Stage("many of codes", 60, f"{CODES} table --kinds w8a8,fp8 --shapes up,down --rows 8192", True),
    Stage("moe", 90, f"{PYTEST} tests/plugins/moe/test_{{triton,coded,e4m3}}.py"),
    Stage("simulated", 400, f"{NO_GPU} python3 benchmarks/cluster_simulation.py --replicas 1000 --jobs 4"
          " --policies 'depth, scale 16, host memory;are killed' --out $OUT"),
    Stage("disk", 60, "python3 benchmarks/disk_reads.py", True),
    Stage("heads of codes", 60, f"{MODELS} {HEADED} --drafts none", True,
          engine("9b-fp8-head-fp8-64-2048-1"), maker="build codes"),
    Stage("vllm codes", 330, theirs("codes", "9b-off,9b-mtp3", quantization="fp8"), **OF_VLLM),
    Stage("vllm two", 330, theirs("two", "9b-mtp3", tensor_parallel_size=2), **OF_VLLM),
    Stage("vllm report", 330, theirs("report", "", tensor_parallel_size=2, **SIXTEEN), **OF_VLLM),
    Stage("vllm report one", 330, theirs("one", "", **SIXTEEN), **OF_VLLM),
)  # fmt: skip
# Beside the stages, one after the other.
BESIDE = (
    f"{MODELS} --models 9b,0.8b --rows 64 --build",
    f"[ ! -f {VLLM}/site.tar.xz ] || PEER_SITE={VLLM}/site PEER_WORK={VLLM}/work bash {VLLM}/install.sh",
    f"{MODELS} --models 9b,0.8b --rows 256 --build",
    f"{MODELS} --models 30b,9b/32k,0.8b/32k --rows 64 --build",
    f"{MODELS} --models nano --rows 256 --build",
)
PEERS = {  # what we call vLLM's configurations, and how many times its tokens a second are asked (issue 9)
    ("9b", "none"): ("9b-off", 1.2),
    ("9b", "mtp"): ("9b-mtp3", 1.5),
    ("0.8b", "none"): ("0.8b-off", 3.0),
    ("0.8b", "mtp"): ("0.8b-mtp3", 3.0),
    ("nano", "none"): ("nano9b-off", 1.3),
}
BESIDE_VLLM = {  # its folder in logs: stages of ours, and what their goal is, if it is another
    "": (("models", "many rows", "more models", "more rows"), 0.0),
    "two": (("9b ranks",), 1.2),
    "codes": (("drafts of codes",), 1.0),
}
ROW_OF_MODEL = r"^\| (\S+) \| (\w+) \| (\d+) \|(.*)"


class Lane(NamedTuple):
    """Stages one after the other, beside other lanes."""

    stages: list[Stage]
    gpus: str
    cores: str


class Done(NamedTuple):
    name: str
    how: str  # passed | failed | cut off | out of time, of the call
    seconds: float
    said: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.2)
    parser.add_argument("--only", default="", help=", ".join(stage.name for stage in known()))
    parser.add_argument(
        "--lanes", default="", help="names of stages, by commas, @GPUS; other lanes by semicolons"
    )
    asked = parser.parse_args()
    named, lanes = names_of(asked.only, "--only"), lanes_of(asked.lanes)
    until = time.monotonic() + 60 * asked.minutes
    asked.out.mkdir(parents=True, exist_ok=True)
    (KEPT / "logs").mkdir(parents=True, exist_ok=True)
    settle()
    environment = environment_of()
    if lanes:
        beside_each_other(lanes, until, environment, asked.out)
        return
    wanted = " ".join(stage.command for stage in known() if stage.name in named)
    builds = not named or MODELS in wanted or PEER in wanted
    meanwhile = "; ".join(("renice -n 19 $$ > /dev/null", *(BESIDE if builds else ())))
    beside = begin(meanwhile, KEPT / "logs/beside.log", environment)
    tried: set[str] = set()
    try:
        while stage := next_stage(tried, named, until - time.monotonic()):
            tried.add(stage.name)
            left = until - time.monotonic()
            done = run(stage, left if stage.again else min(stage.seconds, left), environment, beside)
            note(done, asked.out)
            if done.name == "look" and done.how != "passed":
                sys.exit("there is nothing to run on")
    finally:
        stop(beside, 1)
        tell_all(asked.out)


def known() -> tuple[Stage, ...]:
    return (*STAGES, *LANES)


def names_of(text: str, where: str) -> list[str]:
    named = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := set(named) - {stage.name for stage in known()}:
        sys.exit(f"{where} {', '.join(unknown)}: known are {', '.join(stage.name for stage in known())}")
    return named


def lanes_of(text: str) -> list[Lane]:
    """Cores are dealt out evenly."""
    parts = [part.partition("@") for part in text.split(";") if part.strip()]
    cores, stages = sorted(os.sched_getaffinity(0)), {stage.name: stage for stage in known()}
    each = max(len(cores) // max(len(parts), 1), 1)
    return [
        Lane(
            [stages[name] for name in names_of(names, "--lanes")],
            gpus.strip(),
            ",".join(map(str, cores[n * each % len(cores) :][:each])),
        )
        for n, (names, _, gpus) in enumerate(parts)
    ]


def beside_each_other(lanes: list[Lane], until: float, environment: dict[str, str], out: Path) -> None:
    """All lanes at once; each ends when its stages have, or the time is up."""
    lock, coming = threading.Lock(), {stage.name for lane in lanes for stage in lane.stages}
    given = until, environment, out, lock, coming
    threads = [threading.Thread(target=drive, args=(lane, *given)) for lane in lanes]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        tell_all(out)


def drive(
    lane: Lane, until: float, environment: dict[str, str], out: Path, lock: threading.Lock, coming: set[str]
) -> None:
    """What has passed on this machine does not run again. coming: stages of all lanes that have not ended."""
    given = environment | ({"CUDA_VISIBLE_DEVICES": lane.gpus} if lane.gpus else {})
    for stage in lane.stages:
        with lock:  # nobody writes meanwhile
            passed = any(done.name == stage.name and done.how == "passed" for done in load())
        if not passed and (done := when_ready(stage, until, given, lane.cores, coming)):
            with lock:
                note(done, out)
        coming.discard(stage.name)


def when_ready(
    stage: Stage, until: float, environment: dict[str, str], cores: str, coming: set[str]
) -> Done | None:
    """None: there is too little time."""
    while (left := until - time.monotonic()) >= ENOUGH * stage.seconds:
        is_coming = stage.maker in coming  # looked at first: it may be there a moment later
        if stage.needs is None or stage.needs.exists():
            return run(stage, min(stage.seconds, left), environment, cores=cores)
        if not is_coming:
            return Done(stage.name, "failed", 0, f"there is no {stage.needs}, and nothing makes it")
        time.sleep(0.2)
    print(f"{stage.name}: no time, {left:.0f} s are left", flush=True)
    return None


def note(done: Done, out: Path) -> None:
    save([*(other for other in load() if other.name != done.name), done])
    write(out)
    print(f"{done.name}: {done.how}, {done.seconds:.0f} s, {done.said}", flush=True)


def tell_all(out: Path) -> None:
    write(out)
    print((out / "summary.md").read_text()[:PRINTED], flush=True)


def next_stage(tried: set[str], named: list[str], left: float) -> Stage | None:
    """The first that can begin: what was needed and not there may have come meanwhile."""
    for stage in known() if named else STAGES:
        wanted = stage.name in named if named else stage.again or is_open(stage)
        ready = stage.needs is None or stage.needs.exists()
        if wanted and ready and stage.name not in tried and left >= ENOUGH * stage.seconds:
            return stage
    return None


def is_open(stage: Stage) -> bool:
    """Never run, or not for its time."""
    return all(done.name != stage.name or done.how == "out of time" for done in load())


def settle() -> None:
    """Unpack what came along; a bundle comes in parts, one a call."""
    for folder, site in ((LEASE / "base/whl", SITE), (LEASE / "sanitizer", TOOL)):
        wheels = sorted(folder.glob("*.whl"))
        if wheels and not site.exists():
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
            subprocess.run([*pip, "--target", str(site), *map(str, wheels)], check=True)
    for name, kept in (("vllm", VLLM), ("triton", KEPT)):
        for part in sorted(LEASE.glob(f"{name}[12]")):
            shutil.copytree(part, kept, dirs_exist_ok=True)
    is_joined(VLLM / "site.tar.xz")
    if (packed := LEASE / "compiled/compiled.tar.xz").exists() and not COMPILED.exists():
        shutil.unpack_archive(packed, KEPT, filter="fully_trusted")
    if is_joined(packed := KEPT / "triton.tar.xz") and not TRITON.exists():
        unpack(packed)
        ours = next(TRITON.glob("lib/python*/site-packages"))
        theirs = [folder for folder in sys.path if folder.endswith("-packages")]  # behind ours: torch, pytest
        (ours / "machine.pth").write_text("\n".join(theirs) + "\n")


def is_joined(packed: Path) -> bool:
    """Whether both of its parts have come."""
    parts = sorted(packed.parent.glob(f"{packed.name}.*"))
    if len(parts) == 2 and not packed.exists():
        packed.write_bytes(b"".join(part.read_bytes() for part in parts))
    return packed.exists()


def unpack(packed: Path) -> None:
    """At /, beside what is there."""
    with tarfile.open(packed) as archive:
        for member in archive:
            if not os.path.lexists(Path("/", member.name)):
                archive.extract(member, "/", filter="fully_trusted")


def environment_of() -> dict[str, str]:
    """What stages see."""
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "tests", SITE)))
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    variables = {"PYTHONPATH": folders, "PYTHONUNBUFFERED": "1", "GPU_ENGINES": str(ENGINES)}
    variables["TRITON_CACHE_DIR"] = str(COMPILED)
    return os.environ | threads | variables | {"OUT": str(KEPT / "logs"), "PYTHONDONTWRITEBYTECODE": "1"}


def begin(command: str, log: Path, environment: dict[str, str], cores: str = "") -> subprocess.Popen:
    """A group of processes of its own, so that all of it can be paused and ended."""
    with log.open("a") as file:
        file.write(f"$ {command}\n")
        file.flush()
        shell = [*(["taskset", "-c", cores] if cores else []), "bash", "-c", command]
        return subprocess.Popen(
            shell, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def run(
    stage: Stage,
    seconds: float,
    environment: dict[str, str],
    beside: subprocess.Popen | None = None,
    cores: str = "",
) -> Done:
    log = log_file(stage.name)
    log.unlink(missing_ok=True)
    print(f"{stage.name}: at most {seconds:.0f} s", flush=True)
    start = time.monotonic()
    if stage.is_timed and beside is not None:
        tell(beside, signal.SIGSTOP)
    limit = seconds - PATIENCE if seconds > 2 * PATIENCE else seconds
    process = begin(stage.command, log, environment | {"STAGE_SECONDS": str(int(limit))}, cores)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
        tell(process, signal.SIGINT)
    stop(process, PATIENCE)
    if beside is not None:
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
    """How many tests did what, if any ran; else the last line, of a table or a note if there is one."""
    outcomes = re.findall(r"^\[gw\d+\].* (PASSED|FAILED|ERROR|SKIPPED|XFAIL) ", log, re.MULTILINE)
    if outcomes:
        return ", ".join(f"{outcomes.count(word)} {word.lower()}" for word in dict.fromkeys(outcomes))
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("| ", "* "))] or lines
    return told[-1][:160] if told else "said nothing"


def load() -> list[Done]:
    file = KEPT / "done.json"
    return [Done(*fields) for fields in json.loads(file.read_text())] if file.exists() else []


def save(done: list[Done]) -> None:
    order = [stage.name for stage in known()]
    (KEPT / "done.json").write_text(json.dumps(sorted(done, key=lambda one: order.index(one.name))))


def write(out: Path) -> None:
    """What is known by now: a lease may end at any moment."""
    by_name = {done.name: done for done in load()}
    lines = [f"{where()}", "", "| stage | | seconds | |", "|---|---|---|---|"]
    for done in by_name.values():
        said = done.said.replace("|", "/")
        lines.append(f"| {done.name} | {done.how} | {done.seconds:.0f} | {said} |")
    lines += ["", f"Not run: {', '.join(stage.name for stage in STAGES if stage.name not in by_name)}"]
    for done in by_name.values():
        wrong = bad(done.name)[:12] or (last_lines(done.name) if done.how != "passed" else [])
        lines += [f"* {done.name}: {line}" for line in wrong]
    tables = [f"# Benchmarks of one session on a GPU\n\n{where()}\n"]
    for stage in known():
        if stage.name in by_name and (table := table_of(stage.name)):
            tables.append(f"## {stage.name}\n`{stage.command}`: {by_name[stage.name].how}\n\n{table}\n")
    if beside := beside_vllm():
        tables.append(f"## Tokens a second, and vLLM's in the same session\n{beside}\n")
        lines += ["", beside]
    (out / "summary.md").write_text("\n".join(lines) + "\n")
    (out / "tables.md").write_text("\n".join(tables))
    if PACKED.exists():  # with the logs it may be too large to come back
        shutil.copy(PACKED, out)
    with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
        for path in sorted(path for path in (KEPT / "logs").rglob("*") if path.is_file()):
            with suppress(FileNotFoundError):  # of a stage that begins again
                text = path.read_bytes()  # other lanes write on
                member = tarfile.TarInfo(f"logs/{path.relative_to(KEPT / 'logs')}")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))


def log_file(name: str) -> Path:
    return KEPT / "logs" / f"{name.replace(' ', '_')}.log"


def log_of(name: str) -> str:
    path = log_file(name)
    return path.read_text(errors="replace") if path.exists() else ""


def bad(name: str) -> list[str]:
    """Tests that failed, and lines in which a benchmark says that something differs."""
    lines = re.findall(r"^(?:FAILED|ERROR) .*|^.*(?:OTHER|BAD)\b.*", log_of(name), re.MULTILINE)
    return [line[:200] for line in dict.fromkeys(lines)]


def last_lines(name: str) -> list[str]:
    """Why a stage has failed, or how far it came."""
    return [line[:200] for line in log_of(name).splitlines() if line.strip()][-6:]


def table_of(name: str) -> str:
    """The lines of a benchmark that belong into a document; warnings of others do not."""
    lines = log_of(name).splitlines()[1:]
    is_test = any(re.match(r"=+ test session starts", line) for line in lines)
    table = [line for line in lines if line.startswith(("|", "#", "NVIDIA"))]
    notes = [line for line in lines if line.startswith("*")]  # within a table they would end it
    return "" if is_test else "\n".join([*table, *([""] if notes else []), *notes])


def beside_vllm() -> str:
    """Lines of models, with what vLLM made of the same rows on this machine."""
    lines = []
    for folder, (stages, goals) in BESIDE_VLLM.items():
        file = KEPT / "logs" / folder / "peer.json"
        theirs = json.loads(file.read_text()) if file.exists() else {}
        ours = "\n".join(map(log_of, stages))
        for model, drafts, rows, cells in re.findall(ROW_OF_MODEL, ours, re.MULTILINE):
            config, goal = PEERS.get((model.removesuffix("/fp8"), drafts), ("", 0.0))
            step = theirs.get(config, {}).get(f"decode b{rows}", {})
            if known := step.get("tok_s"):
                speed = float(cells.split("|")[4].replace(",", ""))
                compared = f"{speed:,.0f} | {known:,.0f} | {speed / known:.2f} | {goals or goal}"
                lines.append(f"| {model}{folder and f', {folder}'} | {drafts} | {rows} | {compared} |")
    head = "| model | drafts | rows | ours | vLLM's | ratio | goal |\n|---|---|---|---|---|---|---|\n"
    return head + "\n".join(lines) if lines else ""


def where() -> str:
    """Device, commit, date."""
    named = LEASE / "base/commit"
    commit = named.read_text().strip() if named.exists() else "an unnamed commit"
    device = next((line for line in log_of("look").splitlines() if line.startswith("NVIDIA")), "no GPU")
    return f"{device}; {commit}; {time.strftime('%Y-%m-%d %H:%M')}"


if __name__ == "__main__":
    main()
