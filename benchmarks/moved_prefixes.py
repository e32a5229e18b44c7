"""What it costs to move a prefix to another replica, against computing it there: benchmarks/cluster.md.

    python benchmarks/moved_prefixes.py [--lengths 500,2000,3900] [--rounds 5]

Two replicas of a bundled model: this process, and one that serves what it has stored (Peer). Each row is the
best of so many rounds; in each the answer behind the moved prefix is compared with the plain run's.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hemiola import LLM, SamplingParams
from hemiola.builder.build import Options, build
from hemiola.runtime.serving.peer import Peer

DEMO = Path(__file__).resolve().parents[1] / "demo"
MODELS = ("nemotron-h-code", "qwen3.5-code")
HOST = {"host_cache_bytes": 2**28}
FIRST = SamplingParams(max_tokens=1)
ANSWER = SamplingParams(max_tokens=8, logprobs=2, ignore_eos=True)


def serve(engine_dir: str) -> None:
    """The other replica. Each line of stdin is a prompt to compute."""
    with LLM(engine_dir, **HOST) as llm, Peer(llm.export_prefix) as peer:
        print(peer.address, flush=True)
        for line in sys.stdin:
            llm.generate([list(map(int, line.split()))], FIRST)
            print("ready", flush=True)


def timed(times: dict[str, list[float]], name: str, run: Callable, *given: object) -> object:
    start = time.perf_counter()
    result = run(*given)
    times.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
    return result


def measure(engine_dir: Path, lengths: list[int], rounds: int) -> None:
    command = [sys.executable, __file__, "--serve", str(engine_dir)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen(command, **pipes) as other,
        LLM(engine_dir, **HOST) as llm,
        LLM(engine_dir, drafts="none", prefix_cache=False) as plain,
        Peer() as peer,
    ):
        address = other.stdout.readline().strip()
        text = llm.encode(Path(argparse.__file__).read_text()[:20_000], must_fit=False)
        for length in lengths:
            ids, times = text[:length], {}
            wanted = plain.generate([ids], ANSWER)[0]
            other.stdin.write(" ".join(map(str, ids)) + "\n")
            other.stdin.flush()
            assert other.stdout.readline() == "ready\n"
            for _ in range(rounds):
                llm.reset_prefix_cache()
                timed(times, "compute", llm.generate, [ids], FIRST)
                timed(times, "export", llm.export_prefix, ids)
                llm.reset_prefix_cache()
                packed = timed(times, "fetch", peer.fetch, address, ids)
                edge = timed(times, "import", llm.import_prefix, packed)
                timed(times, "first", llm.generate, [ids], FIRST)
                out = llm.generate([ids], ANSWER)[0]
                assert (out.token_ids, out.logprobs) == (wanted.token_ids, wanted.logprobs)
                assert out.metrics.cached_tokens == edge
            took = {name: min(found) for name, found in times.items()}
            moved = took["fetch"] + took["import"] + took["first"]
            cells = [length, edge, f"{len(packed) / 2**20:.1f}", *(f"{ms:.1f}" for ms in took.values())]
            print(f"| {' | '.join(map(str, cells))} | {moved:.1f} | {moved / took['compute']:.0%} |")
        other.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve")
    parser.add_argument("--lengths", default="500,2000,3900")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; milliseconds")
    for model in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            build(DEMO / model, Path(folder) / model, Options(max_len=4096, max_rows=4))
            print(f"\n{model}")
            measure(Path(folder) / model, [int(one) for one in given.lengths.split(",")], given.rounds)


if __name__ == "__main__":
    main()
