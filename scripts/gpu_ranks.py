"""Engines of several ranks on the GPUs that are here: right, and how fast. Needs two of them at least.

    PYTHONPATH=. python3 scripts/gpu_ranks.py [--parts links,sums,...] [--tp 2] [--folder DIR] [--seconds 60]

| part | what |
|---|---|
| build | the engines of bundled checkpoints, at once |
| links | which GPUs, and whether they reach each other |
| sums | bits of sum, agree and gather at many sizes beside the references; 10^6 sums in graphs, none wrong |
| times | a sum beside NCCL's all-reduce |
| company | what a sum adds behind other work, with one rank late |
| steady | work and a sum, 15,000 times without a wait of the hosts, beside NCCL |
| engines | bundled checkpoints: drafts, prefixes, chunks, batches, with graphs and without: all bits of the
| | plain run; --same-bits: those of one GPU |
| buckets | every number of rows, and every kind of rules and drafts that has graphs: bits of the plain run |
| storms | requests of all kinds at any time, cancelled and preempted; bits of the plain run |
| faults | a rank lost in the middle of a step or while an engine opens, the leader killed: nothing is left |
| models | steps of Qwen3.5-9B (random weights) beside those of one GPU |

Each part is a process of its own with a time limit, and none stops the next. A line of a table per check.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "build": 240,
    "links": 40,
    "sums": 120,
    "times": 60,
    "company": 60,
    "steady": 60,
    "engines": 200,
    "buckets": 220,
    "storms": 200,
    "faults": 120,
    "models": 200,
}
FAMILIES = ("qwen3.5-code", "nemotron-h-code")
RANDOM = "moe-fp8"  # a family of random weights: Qwen3.5 with experts, rounded to FP8
SIZES = {"max_len": 512, "max_rows": 8, "max_step_tokens": 256, "page_len": 64, "chunk_len": 16}
SHAPES = (
    (1, 4096),
    (2, 4096),
    (3, 256),
    (8, 4096),
    (33, 2688),
    (64, 4096),
    (256, 4096),
    (1000, 4096),
    (5000, 5120),
)
CYCLES = 1900  # of a GPU in a microsecond
Call = tuple[list[int], Any]  # a prompt and its SamplingParams
START = "import os\n\n\nclass Stack:\n    "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where engines are kept; default: a temporary folder")
    parser.add_argument("--seconds", type=float, default=60, help="of storms")
    parser.add_argument("--sums", type=int, default=1_000_000, help="in graphs, of the part sums")
    parser.add_argument(
        "--families", default=",".join((*FAMILIES, RANDOM)), help="of engines and of what runs them"
    )
    parser.add_argument(
        "--cases", default="", help="of engines (same: --same-bits) and faults, by semicolons; default: all"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        globals()[asked.part](asked)
        return
    if torch.cuda.device_count() < asked.tp:
        sys.exit(f"gpu_ranks.py: torch finds {torch.cuda.device_count()} CUDA devices here")
    print(
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        asked.folder = asked.folder or Path(folder)
        failed = [part for part in asked.parts.split(",") if not ran(part, asked)]
    print(f"failed: {', '.join(failed) or 'nothing'}")
    sys.exit(bool(failed))


def ran(part: str, asked: argparse.Namespace) -> bool:
    """Whether it went well."""
    given = ["--part", part]
    for name in ("tp", "folder", "seconds", "sums", "families", "cases"):
        given += [f"--{name}", str(getattr(asked, name))]
    print(f"## {part}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, __file__, *given], start_new_session=True)
    try:
        status = process.wait(PARTS[part] + (asked.seconds if part == "storms" else 0))
    except subprocess.TimeoutExpired:
        status = "its time is up"
    finally:  # also where this is interrupted: the next stage needs the GPUs
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    print(f"## {part}: {status} after {time.monotonic() - start:.1f} s\n", flush=True)
    return status == 0


# Kernels alone: a process for each rank.


class Peers:
    """This process and its followers, each with a GPU, and the group of this one."""

    def __init__(self, rank: int, size: int, pipes: list[Any], fd: int, token: int) -> None:
        from hemiola.plugins.gpu.compile import on_demand
        from hemiola.runtime.device.ranks import SharedMemory
        from hemiola.runtime.device.windows import Windows

        torch.cuda.set_device(rank)
        on_demand()
        self.rank, self.size, self.device = rank, size, torch.device("cuda", rank)
        self.memory = SharedMemory(fd, size, token)
        self.windows = Windows(self.memory, rank, self.device)
        self.group = self.windows.open(exchanged(rank, pipes, self.windows.handle))
        self.pipes = pipes

    def meet(self) -> None:
        torch.cuda.synchronize()
        exchanged(self.rank, self.pipes, b"")


def exchanged(rank: int, pipes: list[Any], mine: bytes) -> list[bytes]:
    """What all ranks give. pipes: of rank 0 one to each other, of others one to rank 0."""
    if rank == 0:
        given = [mine, *(pipe.recv() for pipe in pipes)]
        for pipe in pipes:
            pipe.send(given)
        return given
    pipes[0].send(mine)
    return pipes[0].recv()


def with_peers(work: Callable[[Peers], None], size: int) -> None:
    import multiprocessing

    from hemiola.runtime.device.ranks import SharedMemory

    context, memory = multiprocessing.get_context("fork"), SharedMemory.make(size)
    pairs = [context.Pipe() for _ in range(1, size)]
    given = size, memory.fd, memory.token

    def begin(rank: int, pipes: list[Any]) -> None:
        peers = Peers(rank, given[0], pipes, given[1], given[2])
        work(peers)
        peers.meet()

    processes = [context.Process(target=begin, args=(0, [here for here, _ in pairs]))]
    processes += [
        context.Process(target=begin, args=(rank, [there])) for rank, (_, there) in enumerate(pairs, 1)
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        time.sleep(0.1)
        if any(process.exitcode for process in processes):
            memory.stop()  # a kernel that waits for one that failed ends
            time.sleep(2)
            for process in processes:
                process.kill()
            sys.exit("a rank failed")


def build(asked: argparse.Namespace) -> None:
    import multiprocessing

    families = asked.families.split(",")
    jobs = [(family, {"tp": asked.tp}) for family in families]
    if not asked.cases or "same" in asked.cases.split(";"):
        jobs += [(family, {"tp": tp, "same_bits": True}) for family in families for tp in (1, asked.tp)]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_build, args=(asked, *job)) for job in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)
    (asked.folder / f"built-{asked.tp}").touch()


def _build(asked: argparse.Namespace, family: str, options: dict[str, Any]) -> None:
    built(asked, family, **options)


def links(asked: argparse.Namespace) -> None:
    subprocess.run(["nvidia-smi", "topo", "-m"])
    with_peers(_links, asked.tp)


def _links(peers: Peers) -> None:
    others = [other for other in range(peers.size) if other != peers.rank]
    reached = [other for other in others if torch.cuda.can_device_access_peer(peers.rank, other)]
    print(f"rank {peers.rank}: windows are shared; GPUs {reached} are reached", flush=True)


def sums(asked: argparse.Namespace) -> None:
    with_peers(partial(_sums, asked.sums), asked.tp)


def _sums(num: int, peers: Peers) -> None:
    from hemiola.plugins.step import forms
    from hemiola.plugins.sum.cuda import sum as our_sum
    from hemiola.plugins.sum.reference import tree

    ops, wrong = forms("cuda"), []
    for seed, ((tokens, width), dtype) in enumerate(
        itertools.product(SHAPES, (torch.bfloat16, torch.float32))
    ):
        rng = torch.Generator(peers.device).manual_seed(seed)
        parts = [
            (torch.randn(tokens, width, generator=rng, device=peers.device) * 3.0**n).to(dtype)
            for n in range(peers.size)
        ]
        wanted = tree([part.float() for part in parts]).to(dtype)
        for twice, whole in itertools.product((None, False, True), (None, False, True)):
            result = our_sum(parts[peers.rank], peers.group, twice=twice, whole=whole)
            if not torch.equal(result.view(torch.int8), wanted.view(torch.int8)):
                wrong.append((tokens, width, dtype, twice, whole, int((result != wanted).sum())))
            more = our_sum(parts[peers.rank], peers.group, parts[0], twice, whole)
            if not torch.equal(more, (tree([part.float() for part in parts]) + parts[0].float()).to(dtype)):
                wrong.append((tokens, width, dtype, twice, whole, "with a residual"))
    for lines in (1, 7, 300, 40_000):
        rng = torch.Generator(peers.device).manual_seed(lines)
        logits = [
            torch.randn(lines, 96, generator=rng, device=peers.device).round(decimals=1)
            for _ in range(peers.size)
        ]
        best = [ops.best(part) for part in logits]
        result = ops.agree(*best[peers.rank], peers.group, 96)
        wanted = ops.best(torch.cat(logits, 1))
        if not all(map(torch.equal, result, wanted)):
            wrong.append(("agree", lines))
        if not torch.equal(ops.gather(logits[peers.rank], peers.group), torch.cat(logits, 1)):
            wrong.append(("gather", lines))
    peers.meet()
    if peers.rank == 0:
        row(f"bits at {len(SHAPES)} sizes, 2 dtypes, 9 ways; agree, gather at 4", wrong or "equal")
    bad, num, seconds = _loop(peers, our_sum, num)
    print(f"| rank {peers.rank}: {num} sums in graphs | {seconds:.1f} s | {bad} wrong |", flush=True)
    if wrong or bad:
        sys.exit(1)


def _loop(peers: Peers, our_sum: Callable[..., torch.Tensor], wanted: int) -> tuple[int, int, float]:
    """Sums of small numbers that are others each time; every one is looked at."""
    device, at_once = peers.device, 500
    count = torch.zeros(1, device=device)
    bad = torch.zeros(1, dtype=torch.int64, device=device)
    sizes = (
        (1, 4096),
        (1, 4096),
        (2, 4096),
        (1, 2688),
        (1, 4096),
        (8, 4096),
        (1, 256),
        (1, 4096),
        (4, 4096),
        (64, 4096),
        (600, 4096),
    )
    bases = [torch.arange(t * w, device=device).remainder(61).view(t, w).float() for t, w in sizes]

    def one(n: int) -> None:
        base = bases[n % len(sizes)]
        count.add_(1)
        mine = (base + count.remainder(17) + peers.rank).bfloat16()
        result = our_sum(mine, peers.group)
        right = peers.size * (base + count.remainder(17)) + peers.size * (peers.size - 1) / 2
        bad.add_((result != right.bfloat16()).sum())

    for n in range(len(sizes)):
        one(n)
    peers.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(at_once):
            one(n)
    peers.meet()
    start = time.perf_counter()
    num = wanted // at_once
    for _ in range(num):
        graph.replay()
    torch.cuda.synchronize()
    return int(bad), num * at_once, time.perf_counter() - start


def times(asked: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "NCCL_NVLS_ENABLE": "0"}
    row("rows x 4096, bf16", "lines, us", "blocks, us", "as chosen", "NCCL in a graph, us", "ours / NCCL")
    row(*["---"] * 6)
    with_peers(_times, asked.tp)


def _times(peers: Peers) -> None:
    import torch.distributed as dist

    from hemiola.plugins.sum.cuda import sum as our_sum

    dist.init_process_group("nccl", rank=peers.rank, world_size=peers.size, device_id=peers.device)
    for rows in (1, 4, 16, 64, 256, 1024, 4096):
        x = torch.randn(rows, 4096, device=peers.device).bfloat16()
        lines = _us(peers, lambda x=x: our_sum(x, peers.group, whole=False))
        blocks = _us(peers, lambda x=x: our_sum(x, peers.group, whole=True))
        ours = _us(peers, lambda x=x: our_sum(x, peers.group))
        theirs = _us(peers, lambda x=x: dist.all_reduce(x))
        if peers.rank == 0:
            print(
                f"| {rows} | {lines:.2f} | {blocks:.2f} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |",
                flush=True,
            )
    peers.meet()
    os._exit(0)  # NCCL takes seconds to end


def company(asked: argparse.Namespace) -> None:
    row("rows", "late by, us", "work alone, us", "lines add", "blocks add")
    row(*["---"] * 5)
    with_peers(_company, asked.tp)


def _company(peers: Peers) -> None:
    """Work is a kernel that moves 96 MB; behind it ranks are late in turns."""
    from hemiola.plugins.sum.cuda import sum as our_sum

    a = torch.randn(24 * 2**20, device=peers.device).bfloat16()
    b, turn = torch.empty_like(a), itertools.count()

    def work(late: int) -> None:
        torch.add(a, 1, out=b)
        if late and next(turn) % peers.size == peers.rank:
            torch.cuda._sleep(late * CYCLES)

    for rows, late in itertools.product((1, 64, 256), (0, 5, 20, 60)):
        x = torch.randn(rows, 4096, device=peers.device).bfloat16()
        more = torch.randn(rows, 4096, device=peers.device).bfloat16()

        def both(whole: bool, x: torch.Tensor = x, more: torch.Tensor = more, late: int = late) -> None:
            work(late)
            our_sum(x, peers.group, more, whole=whole)

        def alone(late: int = late) -> None:
            torch.add(a, 1, out=b)
            if late:
                torch.cuda._sleep(late * CYCLES)

        plain = _us(peers, alone)
        lines, blocks = (_us(peers, partial(both, whole)) for whole in (False, True))
        if peers.rank == 0:
            row(rows, late, f"{plain:.2f}", f"{lines - plain:.2f}", f"{blocks - plain:.2f}")


def steady(asked: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "NCCL_NVLS_ENABLE": "0"}
    row("rows x 4096", "by", "us of work and sum: least", "10 %", "50 %", "90 %", "99 %", "most")
    row(*["---"] * 8)
    with_peers(_steady, asked.tp)


def _steady(peers: Peers) -> None:
    """Each replay of 50 is timed, and no host waits between them. One rank begins late: sums whose ranks were
    late once had stayed slow (plugins/gpu/exchange.py)."""
    import torch.distributed as dist

    from hemiola.plugins.sum.cuda import sum as our_sum

    dist.init_process_group("nccl", rank=peers.rank, world_size=peers.size, device_id=peers.device)
    a = torch.randn(48 * 2**20, device=peers.device).bfloat16()
    b = torch.empty_like(a)
    for rows in (64, 256):
        x = torch.randn(rows, 4096, device=peers.device).bfloat16()
        ways: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "lines": lambda x=x: our_sum(x, peers.group, x, whole=False),
            "blocks": lambda x=x: our_sum(x, peers.group, x, whole=True),
            "NCCL": lambda x=x: dist.all_reduce(x),
        }
        for name, run in ways.items():

            def both(run: Callable[[], object] = run) -> None:
                torch.add(a, 1, out=b)
                run()

            times = sorted(_replays(peers, both, 300, peers_meet=False, late_ms=5))
            if peers.rank == 0:
                shown = [times[int(part * (len(times) - 1))] for part in (0, 0.1, 0.5, 0.9, 0.99, 1)]
                row(rows, name, *(f"{number:.1f}" for number in shown))
    peers.meet()
    os._exit(0)  # NCCL takes seconds to end


def _us(peers: Peers, run: Callable[[], object]) -> float:
    """Median of ten rounds."""
    return sorted(_replays(peers, run, 12, peers_meet=True)[2:])[5]


def _replays(
    peers: Peers, run: Callable[[], object], num: int, peers_meet: bool, late_ms: int = 0
) -> list[float]:
    """Microseconds of one of 50 in a graph, for each time that it is replayed. peers_meet: before each.
    late_ms: the first rank begins so much behind the others."""
    each = 50
    for _ in range(3):
        run()
    peers.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(each):
            run()
    peers.meet()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num)]
    if peers.rank == 0:
        torch.cuda._sleep(late_ms * 1000 * CYCLES)
    for start, end in pairs:
        if peers_meet:
            peers.meet()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) / each for start, end in pairs]


# Engines.


def checkpoint(asked: argparse.Namespace, family: str) -> Path:
    """A bundled one, or a config of a small model with the ways of a large one."""
    if family != RANDOM:
        return ROOT / "demo" / family
    folder = asked.folder / "checkpoints" / f"{family}-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((ROOT / "benchmarks/configs/qwen3.5-35b-a3b/config.json").read_text())
    inner, heads = 128 * asked.tp, 2 * asked.tp  # a rank's inputs are those of whole scales
    config |= {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": heads, "head_dim": 64}
    config |= {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": inner}
    config |= {"shared_expert_intermediate_size": inner, "linear_num_key_heads": heads}
    config |= {"linear_num_value_heads": heads, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    config |= {"vocab_size": 2048, "eos_token_id": 2047}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def built(asked: argparse.Namespace, family: str, **options: Any) -> Path:
    from hemiola.builder.build import build
    from hemiola.builder.options import Options
    from hemiola.runtime.arch import arch_here

    name = "-".join([family, *(f"{key}={value}" for key, value in sorted(options.items()))])
    engine_dir = asked.folder / name
    if not (engine_dir / "manifest.json").is_file():
        start = time.monotonic()
        rounded = {"random_weights": True, "quantize": "fp8"} if family == RANDOM else {}
        given = SIZES | rounded | options
        build(checkpoint(asked, family), engine_dir, Options(arch=arch_here(), **given))
        print(f"* {name}: built in {time.monotonic() - start:.1f} s", flush=True)
    return engine_dir


def opened(engine_dir: Path, **options: Any) -> Any:
    from hemiola.runtime.llm import LLM
    from hemiola.runtime.step import ranked

    ranked.CHECKED_EVERY = 1
    return LLM(engine_dir, progress=False, **options)


def asked_for(text: list[int], seed: int, num: int) -> list[Call]:
    """Prompts and parameters of all kinds."""
    from hemiola.runtime.api import SamplingParams

    dice, calls = random.Random(seed), []
    for n in range(num):
        length = dice.choice([3, 17, 63, 64, 65, 100, 130, 200])
        kind = n % 5
        params: dict[str, Any] = {
            "max_tokens": dice.choice([8, 24, 48]),
            "temperature": 0.0,
            "ignore_eos": True,
        }
        if kind in (1, 4):
            params["logprobs"] = 5
        if kind == 2:
            params |= {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": n}
        if kind == 3:
            params |= {"repetition_penalty": 1.2, "logprobs": 2}
        if kind == 4:
            params["prompt_logprobs"] = 2
        begin = dice.choice([0, 0, 0, n])
        calls.append((text[begin : begin + length], SamplingParams(**params)))
    return calls


def said(output: Any) -> tuple[Any, ...]:
    """What must be equal, to the last bit."""
    return output.token_ids, output.logprobs, output.prompt_logprobs, output.finish_reason


def answers(engine_dir: Path, calls: list[Call], **options: Any) -> list[tuple[Any, ...]]:
    """All at once, twice: what was kept of the first time is found the second."""
    with opened(engine_dir, **options) as llm:
        prompts, params = map(list, zip(*calls, strict=True))
        first = [said(output) for output in llm.generate(prompts, params)]
        assert first == [said(output) for output in llm.generate(prompts, params)], (
            "the second time is another"
        )
        return first


def plain(engine_dir: Path, calls_of: Callable[[list[int]], list[Call]]) -> tuple[list[Call], list[tuple]]:
    """Requests made of a greedy text, and their answers one by one, with nothing on."""
    from hemiola.runtime.api import SamplingParams

    start = time.monotonic()
    with opened(engine_dir, drafts="none", prefix_cache=False, max_rows=1) as llm:
        opening = time.monotonic() - start
        ids, params = start_of(llm), SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
        calls = calls_of(ids + llm.generate([ids], params)[0].token_ids)
        outputs = [said(llm.generate([prompt], params)[0]) for prompt, params in calls]
    seconds = time.monotonic() - start - opening
    print(f"* {engine_dir.name}: open in {opening:.1f} s, plain run in {seconds:.1f} s", flush=True)
    return calls, outputs


def start_of(llm: Any) -> list[int]:
    return llm.encode(START) if llm.manifest.has_tokenizer else [*range(20, 40)]


CASES: dict[str, dict[str, Any]] = {
    "mtp": {"drafts": "mtp", "num_drafts": 3},
    "no graphs": {"drafts": "mtp", "num_drafts": 3, "cuda_graphs": False},
    "none": {"drafts": "none"},
    "ngram": {"drafts": "ngram", "num_drafts": 3, "ngram_min": 1},
    "mtp, no prefixes": {"drafts": "mtp", "num_drafts": 2, "prefix_cache": False},
    "mtp, chunks of 63": {"drafts": "mtp", "num_drafts": 1, "max_step_tokens": 63},
    "mtp, 3 rows, 14 pages": {"drafts": "mtp", "num_drafts": 3, "max_rows": 3, "num_pages": 14},
    "mtp, host's memory": {"drafts": "mtp", "num_drafts": 3, "num_pages": 14, "host_cache_bytes": 2**28},
    "none, depth 2": {"drafts": "none", "pipeline_depth": 2, "max_rows": 4},
}


def engines(asked: argparse.Namespace) -> None:
    bad, chosen = 0, asked.cases.split(";") if asked.cases else [*CASES]
    for family in asked.families.split(","):
        if any(name in CASES for name in chosen):
            engine_dir = built(asked, family, tp=asked.tp)
            calls, wanted = plain(engine_dir, lambda text: asked_for(text, 0, 30))
        for name in (name for name in CASES if name in chosen):
            start = time.monotonic()
            try:
                outputs = answers(engine_dir, calls, **CASES[name])
                others = [n for n, pair in enumerate(zip(outputs, wanted, strict=True)) if pair[0] != pair[1]]
                result = f"OTHER in {others}" if others else "equal"
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            bad += result != "equal"
            row(family, name, f"{len(calls)} requests", result, f"{time.monotonic() - start:.1f} s")
        if asked.cases and "same" not in chosen:
            continue
        try:
            dirs = [built(asked, family, tp=tp, same_bits=True) for tp in (1, asked.tp)]
            calls, wanted = plain(dirs[0], lambda text: asked_for(text, 1, 12))
            result = "equal" if plain(dirs[1], lambda _, calls=calls: calls)[1] == wanted else "OTHER"
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        bad += result != "equal"
        row(family, f"--same-bits: 1 and {asked.tp} GPUs", "12 requests", result)
    sys.exit(bad > 0)


MIXES: tuple[tuple[dict[str, Any], ...], ...] = (
    ({},),
    ({"temperature": 0.9, "top_p": 0.95}, {}),  # sorts
    ({"temperature": 0.9, "top_k": 50, "top_p": 0.95}, {}),
    ({"repetition_penalty": 1.1, "logprobs": 2}, {"temperature": 0.9, "top_k": 50}, {}),
)


def buckets(asked: argparse.Namespace) -> None:
    """Every number of rows and every kind of rules and drafts that has graphs (tests/gpu/test_graphs.py)."""
    from hemiola.runtime.api import SamplingParams

    bad, together = 0, [*itertools.product((1, 2, 3, 5, 8), MIXES)]

    def calls_of(text: list[int]) -> list[Call]:
        greedy: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        return [
            (text[: 17 + 9 * at], SamplingParams(**greedy | {"seed": at} | mix[at % len(mix)]))
            for num, mix in together
            for at in range(num)
        ]

    for family in asked.families.split(","):
        engine_dir = built(asked, family, tp=asked.tp)
        calls, wanted = plain(engine_dir, calls_of)
        with opened(engine_dir, drafts="mtp", num_drafts=3, adaptive_drafts=False) as llm:
            outputs, used, idle = [], set(), random.Random(3)
            whole, left = llm._loop.steps.steps.whole, iter(calls)
            run, longest = whole.run, [0]
            whole.run = lambda size, run=run, used=used: used.add(size) or run(size)

            def choose(
                requests: list[Any], max_drafts: list[int], idle: Any = idle, longest: Any = longest
            ) -> Any:
                if idle.random() < 0.4:
                    longest[0] = idle.choice([0, 3])
                return [min(num, longest[0]) for num in max_drafts]

            llm._loop.scheduler.pace.choose = choose
            for num, _ in together:
                prompts, params = map(list, zip(*itertools.islice(left, num), strict=True))
                outputs += [said(output) for output in llm.generate(prompts, params)]
            missing = {b[:2] for b in whole.buckets} - {b[:2] for b in used}
            missing |= kinds_of(whole.buckets) - kinds_of(used)
            others = [n for n, pair in enumerate(zip(outputs, wanted, strict=True)) if pair[0] != pair[1]]
            bad += bool(missing or others)
            graphs = (
                f"{len(used)} of {len(whole.buckets)} graphs, {f'not {missing}' if missing else 'all kinds'}"
            )
            row(family, graphs, f"{len(calls)} requests", f"OTHER in {others}" if others else "equal")
    sys.exit(bad > 0)


def kinds_of(buckets: Any) -> set[tuple[int, int, int]]:
    """Tokens of a row, drafts, and pairs of a row that a drafting head reads."""
    return {(b.tokens // b.rows, b.passes, b.pairs // b.rows) for b in buckets}


def storms(asked: argparse.Namespace) -> None:
    """Until the time is up."""
    bad = done = 0
    dirs = [built(asked, family, tp=asked.tp) for family in asked.families.split(",")]
    known = [(one, *plain(one, lambda text: asked_for(text, 7, 40))) for one in dirs]
    until = time.monotonic() + asked.seconds
    for seed in itertools.count():
        if time.monotonic() > until:
            break
        dice = random.Random(seed)
        engine_dir, calls, wanted = known[seed % len(known)]
        options = {
            "drafts": ["mtp", "ngram", "mtp", "none"][seed // len(known) % 4],
            "max_rows": dice.choice([3, 8]),
            "num_pages": dice.choice([9, 14, 60]),
            "max_step_tokens": dice.choice([63, 193, 256]),
            "pipeline_depth": dice.choice([0, 1, 2]),
            "num_snapshots": dice.choice([1, 2, 20]),
        }
        if options["drafts"] != "none":
            options["num_drafts"] = dice.choice([1, 2, 3])
        with opened(engine_dir, **options) as llm:
            for _ in range(50):
                wrong = _storm(llm, dice, calls, wanted)
                done, bad = done + 1, bad + bool(wrong)
                if wrong:
                    print(f"seed {seed}, {options}: {wrong}", flush=True)
                if time.monotonic() > until:
                    break
        print(f"* {done} storms so far, {bad} wrong", flush=True)
    row(f"{done} storms of 30 requests", f"{seed} engines", "ledgers compared in every step", f"{bad} wrong")
    sys.exit(bad > 0 or done == 0)


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def _storm(llm: Any, dice: random.Random, calls: list[Any], wanted: list[Any]) -> list[str]:
    """Requests that come at any time, some of which are cancelled; what was wrong."""
    from hemiola.runtime.schedule.collector import Collector

    collectors, wrong, cancelled = [], [], set()
    for _ in range(30):
        n = dice.randrange(len(calls))
        prompt, params = calls[n]
        request = llm._request(prompt, params)
        done = threading.Event()
        collector = Collector(request, lambda _, done=done: done.set())
        llm._loop.submit(request, collector)
        collectors.append((n, collector, done, request.id))
        if dice.random() < 0.15:
            cancelled.add(request.id)
            llm.abort(request.id)
        time.sleep(dice.choice([0, 0, 0.002, 0.01]))
    for n, collector, done, request_id in collectors:
        if not done.wait(60):
            return [f"request {request_id} does not end"]
        output = collector.output
        answer, right = said(output), wanted[n]
        if request_id in cancelled:
            if answer[0] != right[0][: len(answer[0])]:
                wrong.append(f"request {request_id}, cancelled: other tokens")
        elif answer != right:
            wrong.append(f"request {request_id} (call {n})")
    return wrong


LEADER = """
import sys, time
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM
try:
    llm = LLM(sys.argv[1], progress=False)
except Refused as error:
    sys.exit(str(error))
params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
llm.submit(llm.encode("def "), params, lambda piece: print(piece.token_ids, flush=True))
time.sleep(60)
"""


def faults(asked: argparse.Namespace) -> None:
    engine_dir, verdicts = built(asked, FAMILIES[0], tp=asked.tp), []
    faults = {
        "killed": lambda: _lost(engine_dir, signal.SIGKILL),
        "stopped": lambda: _lost(engine_dir, signal.SIGSTOP),
        "killed while the engine opens": lambda: _lost_early(engine_dir),
        "leader killed": lambda: _leader_lost(engine_dir),
        "too few GPUs": lambda: _too_few(engine_dir, asked.tp),
    }
    for name, run in faults.items():
        if not asked.cases or name in asked.cases.split(";"):
            good, said = run()
            time.sleep(1)  # until the driver has taken the memory back
            left, used = _followers(os.getpid()), _used(1)
            good = good and not left and used < 2**30
            verdicts.append(good)
            mib = f"{used / 2**20:.0f} MiB in use on GPU 1"
            row(name, said, f"followers left: {len(left)}", mib, "good" if good else "BAD")
    with opened(engine_dir) as llm:
        row("opened again in the same process", said_of(llm))
    sys.exit(not all(verdicts))


def said_of(llm: Any) -> str:
    from hemiola.runtime.api import SamplingParams

    return str(llm.generate([llm.encode(START)], SamplingParams(max_tokens=8, temperature=0.0))[0].token_ids)


def _lost(engine_dir: Path, word: int) -> tuple[bool, str]:
    """A follower, in the middle of a stream."""
    from hemiola.runtime.api import SamplingParams

    llm = opened(engine_dir)
    pid = _followers(os.getpid())[0]
    num, ends, tokens = [0], [], threading.Event()
    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    llm.submit(llm.encode(START), params, lambda piece: _note(piece, num, ends, tokens))
    tokens.wait(30)
    start = time.monotonic()
    os.kill(pid, word)
    while not ends and time.monotonic() - start < 40:
        time.sleep(0.005)
    seconds = time.monotonic() - start
    llm.close()
    closing = time.monotonic() - start - seconds
    return bool(ends), f"after {num[0]} tokens: {ends[:1]} {seconds:.2f} s later; closed in {closing:.2f} s"


def _lost_early(engine_dir: Path) -> tuple[bool, str]:
    from hemiola.runtime.llm import LLM

    since = []

    def report(stage: str, done: int, total: int) -> None:
        if stage == "capturing graphs of decode steps" and not since:
            since.append(time.monotonic())
            os.kill(_followers(os.getpid())[0], signal.SIGKILL)

    try:
        LLM(engine_dir, progress=report).close()
    except Exception as error:
        return True, f"{type(error).__name__}: {error} {time.monotonic() - since[0]:.2f} s later"
    return False, "it opened"


def _leader_lost(engine_dir: Path) -> tuple[bool, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(engine_dir)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(5):
        process.stdout.readline()
    pids = _followers(process.pid)
    process.kill()
    start = time.monotonic()
    while any(_lives(pid) for pid in pids) and time.monotonic() - start < 20:
        time.sleep(0.01)
    seconds = time.monotonic() - start
    return bool(pids) and seconds < 5, f"{len(pids)} followers ended {seconds:.2f} s later"


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _too_few(engine_dir: Path, tp: int) -> tuple[bool, str]:
    seen = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(tp - 1)))}
    given = [sys.executable, "-c", LEADER, str(engine_dir)]
    done = subprocess.run(given, env=seen, capture_output=True, text=True, timeout=60)
    lines = done.stderr.strip().splitlines()
    return done.returncode == 1 and "--tp" in lines[-1], lines[-1]


def _note(piece: Any, num: list[int], ends: list[str], tokens: threading.Event) -> None:
    num[0] += len(piece.token_ids)
    if num[0] >= 20:
        tokens.set()
    if piece.finish_reason is not None:
        ends.append(
            f"{piece.finish_reason}: {piece.error}" if getattr(piece, "error", "") else piece.finish_reason
        )


def _followers(parent: int) -> list[int]:
    """Children of this process that are ranks."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "stat").read_text().rpartition(")")[2].split()
            line = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if int(words[1]) == parent and b"follower" in line and words[0] != "Z":
            pids.append(int(path.name))
    return pids


def _used(device: int) -> int:
    """Bytes of a GPU's memory, by whomever."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", str(device)]
    return int(subprocess.run(asked, capture_output=True, text=True).stdout.split()[0]) * 2**20


def models(asked: argparse.Namespace) -> None:
    """In a process for each number of ranks."""
    script = ROOT / "benchmarks" / "gpu_models.py"
    for tp in (1, asked.tp):
        print(f"* --tp {tp}", flush=True)
        subprocess.run([sys.executable, str(script), *_of_models(asked, tp)], check=True)


def _of_models(asked: argparse.Namespace, tp: int) -> list[str]:
    given = ["--models", "9b", "--rows", "1,64", "--drafts", "none,mtp", "--tp", str(tp)]
    return [*given, "--engines", str(asked.folder)]


if __name__ == "__main__":
    main()
