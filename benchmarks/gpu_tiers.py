"""What prefixes below a GPU's cache cost, against computing them: benchmarks/cluster.md.

    PYTHONPATH=. python3 benchmarks/gpu_tiers.py [--tokens 8000] [--rounds 5] [--engines FOLDER]
        [--rehearse]

A model of Qwen3.5-9B's sizes with random weights. First, milliseconds to the first token of a prompt that is
computed, in the cache, in the host's memory, and in a file; every answer's tokens and log-probabilities are
the computed one's. Then what steps of 32 rows take alone, beside copies of --tokens to the host and back ten
times a second, and beside requests that start from the host's memory or from the cache, as often.
--rehearse: a small model on the CPU, to see that it runs.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gpu_models import CONFIGS, NAMES

from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.arch import arch_here
from hemiola.runtime.cache.prefix import PrefixCache
from hemiola.runtime.config import state_bytes
from hemiola.runtime.llm import LLM

ROOT = Path(__file__).resolve().parents[1]
PLAIN = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SCORED = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2)
NUM_ROWS, CONTEXT = 32, 256
SECONDS, PERIOD = 2.5, 0.1  # of each part of the second half; between two hits or copies


class Sizes(NamedTuple):
    """Of a prompt, in the engine's units."""

    num_tokens: int
    num_pages: int
    num_bytes: int  # in the host's memory, with the state


class Answer(NamedTuple):
    ms: float  # to the first token
    scores: list[tuple]  # its tokens, and their log-probabilities if asked for
    cached: int


def prompts(llm: LLM, count: int, num_tokens: int, seed: int) -> list[list[int]]:
    most = min(llm.manifest.vocab_size, 100_000)
    return np.random.default_rng(seed).integers(0, most, (count, num_tokens)).tolist()


def ask(llm: LLM, prompt: list[int], params: SamplingParams = SCORED) -> Answer:
    came: list[float] = []
    pieces: list[Piece] = []
    done = threading.Event()

    def note(piece: Piece) -> None:
        came.append(time.perf_counter())
        pieces.append(piece)
        if piece.finish_reason is not None:
            done.set()

    start = time.perf_counter()
    llm.submit(prompt, params, note)
    assert done.wait(300), "no answer"
    last = pieces[-1]
    assert last.finish_reason == "length" and last.metrics is not None, last
    scores = [(token_id,) for piece in pieces for token_id in piece.token_ids]
    scores += [(s.token_id, s.logprob, s.top) for piece in pieces for s in piece.logprobs or ()]
    return Answer(1e3 * (came[0] - start), scores, last.metrics.cached_tokens)


def to_host(prefix: PrefixCache) -> None:
    """Let the cache give up all that nobody runs from."""
    while (entry := prefix.evictor.page_victim()) is not None:
        prefix._evict(entry)


def to_file(prefix: PrefixCache) -> None:
    """And the host's memory, too."""
    to_host(prefix)
    assert prefix.host is not None and prefix.disk is not None and prefix.disk.drain(60)
    while prefix.host._give_up_one():
        pass


def show(name: str, found: list[Answer], computed_ms: float, wanted: list[list[tuple]]) -> None:
    ms = [one.ms for one in found[3:]]
    same = [one.scores for one in found] == wanted
    print(
        f"| {name} | {statistics.median(ms):.1f} | {min(ms):.1f}-{max(ms):.1f} |"
        f" {statistics.median(ms) / computed_ms:.1%} | {min(one.cached for one in found[3:])} |"
        f" {'equal' if same else 'OTHER BITS'} |",
        flush=True,
    )


def first_tokens(engine_dir: Path, sizes: Sizes, rounds: int, folder: Path) -> None:
    """A row for each place of a prefix."""
    print("| the prefix is | ms to the first token | from-to | of computing | tokens found | |")
    print("|---|---|---|---|---|---|")
    with LLM(engine_dir, drafts="none", host_cache_bytes=4 * sizes.num_bytes) as llm:
        asked = prompts(llm, 3, sizes.num_tokens, 1)

        def several(before: Callable[[], object]) -> list[Answer]:
            """The first round loads what a first time needs, and has log-probabilities; it is not timed."""
            found = []
            for params in (SCORED, *[PLAIN] * rounds):
                for prompt in asked:
                    before()
                    found.append(ask(llm, prompt, params))
            return found

        computed = several(llm.reset_prefix_cache)
        ms, wanted = statistics.median(one.ms for one in computed[3:]), [one.scores for one in computed]
        show("nowhere: computed", computed, ms, wanted)
        show("in the cache", several(lambda: None), ms, wanted)
        show("in the host's memory", several(lambda: llm._loop.visit(to_host)), ms, wanted)
        assert llm.tiers["host"].statistics.num_hits >= 3 * rounds
    disk = {"disk_cache_dir": str(folder), "disk_cache_bytes": 5 * sizes.num_bytes}
    with LLM(engine_dir, drafts="none", host_cache_bytes=sizes.num_bytes * 5 // 4, **disk) as llm:
        for name, before in (
            ("that the OS has in memory", lambda: None),
            ("that it has not", lambda: forget(folder)),
        ):
            found = several(lambda before=before: (llm._loop.visit(to_file), before()))
            show(f"in a file {name}", found, ms, wanted)
        print(f"{llm.tiers['disk']}", flush=True)


def forget(folder: Path) -> None:
    """Let the operating system drop what it has of files."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


class Decoding:
    """Rows that decode, and how many steps they take."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        params = SamplingParams(max_tokens=llm.config.max_len - CONTEXT, temperature=0.0, ignore_eos=True)
        begun = threading.Barrier(2)
        left = set(range(NUM_ROWS))

        def note(n: int) -> None:
            if n in left:
                left.remove(n)
                if not left:
                    begun.wait()

        rows = enumerate(prompts(llm, NUM_ROWS, CONTEXT, 2))
        self.ids = [llm.submit(prompt, params, lambda _, n=n: note(n)) for n, prompt in rows]
        begun.wait(300)

    def token_ms(self, beside: Callable[[], object] | None = None, num_own: int = 0) -> tuple[float, int]:
        """Milliseconds of a row's token, while `beside` is called every PERIOD, and brings so many tokens of
        its own; and how often it was."""
        num_calls, stop = 0, threading.Event()

        def call() -> None:
            nonlocal num_calls
            begun = time.perf_counter()
            while beside is not None and not stop.is_set():
                beside()
                num_calls += 1
                stop.wait(max(0.0, begun + num_calls * PERIOD - time.perf_counter()))

        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(3 * PERIOD)
        before, before_calls, start = self.llm.counters.num_output_tokens, num_calls, time.perf_counter()
        time.sleep(SECONDS)
        num, seconds = self.llm.counters.num_output_tokens - before, time.perf_counter() - start
        calls = num_calls - before_calls
        stop.set()
        thread.join()
        assert self.llm.load().num_running == NUM_ROWS
        return 1e3 * seconds * NUM_ROWS / (num - calls * num_own), calls

    def end(self) -> None:
        for request_id in self.ids:
            self.llm.abort(request_id)


class Copies:
    """Of idle pages to the host, or to it and back to where they were."""

    def __init__(self, llm: LLM, num_pages: int, back: bool) -> None:
        self.llm, self.num_pages, self.back, self.mark = llm, num_pages, back, 0
        self.idle: list[int] = []  # nobody evicts them: there is room

    def __call__(self) -> None:
        self.llm._loop.visit(self.act)

    def act(self, prefix: PrefixCache) -> None:
        host = prefix.host
        assert host is not None
        if self.mark:
            host.mover.hold(self.mark)
        if not self.idle:
            found = prefix._tree.entries.values()
            self.idle = [e.page_id for e in found if not prefix.pages.refs[e.page_id]][: self.num_pages]
        units = host.reserve(self.num_pages)
        assert units is not None and len(self.idle) == self.num_pages
        host.mover.save_pages(self.idle, units)
        if self.back:
            host.mover.load_pages(units, self.idle)
            self.mark = host.mover.mark()
        host.take_back(units)


def beside_steps(engine_dir: Path, sizes: Sizes) -> None:
    """What steps take alone, beside copies, and beside requests."""
    print(f"\n| {NUM_ROWS} rows decode | ms a token of each row | more than alone | in {SECONDS:.0f} s |")
    print("|---|---|---|---|")
    with LLM(engine_dir, drafts="none", host_cache_bytes=6 * sizes.num_bytes) as llm:
        pair = prompts(llm, 2, sizes.num_tokens, 3)
        answers = [ask(llm, prompt, PLAIN).scores for prompt in pair]
        num_asked, all_same = 0, True

        def hit(before: Callable[[], object]) -> None:
            nonlocal num_asked, all_same
            before()
            n = num_asked % 2
            num_asked += 1
            all_same &= ask(llm, pair[n], PLAIN).scores == answers[n]

        def from_host() -> None:
            hit(lambda: llm._loop.visit(to_host))

        decoding = Decoding(llm)
        own = PLAIN.max_tokens or 0
        parts = {
            f"beside copies of {sizes.num_pages} pages to the host": (Copies(llm, sizes.num_pages, False), 0),
            f"beside copies of {sizes.num_pages} pages to the host and back": (
                Copies(llm, sizes.num_pages, True), 0,
            ),
            "beside requests from the cache": (lambda: hit(lambda: None), own),
            "beside requests from the host's memory": (from_host, own),
        }  # fmt: skip
        alone: list[float] = []
        for name, (beside, num_own) in parts.items():
            alone.append(decoding.token_ms()[0])
            found, calls = decoding.token_ms(beside, num_own)
            alone.append(decoding.token_ms()[0])
            more = 2 * found / sum(alone[-2:]) - 1
            print(f"| alone, before and after | {alone[-2]:.3f}, {alone[-1]:.3f} | | |")
            print(f"| {name} | {found:.3f} | {more:.1%} | {calls} |", flush=True)
        print(f"answers {'equal' if all_same else 'OTHER BITS'}; {llm.tiers['host']}", flush=True)
        decoding.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        engine_dir = (asked.engines or Path(name)) / "tiers"
        begun = time.perf_counter()
        if not engine_dir.is_dir():
            sizes = {"max_len": asked.tokens + 1024, "max_rows": NUM_ROWS + 4, "max_step_tokens": 8192}
            if asked.rehearse:
                build(ROOT / "demo/qwen3.5-code", engine_dir, Options(**sizes))
            else:
                own = Options(arch=arch_here(), random_weights=True, **sizes)
                build(CONFIGS / NAMES["9b"], engine_dir, own)
        with LLM(engine_dir, drafts="none") as llm:
            config, states = llm.config, llm.manifest.states
            page, slot = state_bytes(states, "page"), state_bytes(states, "slot")
        num_pages = -(-(asked.tokens + 8) // config.page_len)
        found = Sizes(asked.tokens, num_pages, num_pages * page + slot)
        where = "cpu" if asked.rehearse else torch.cuda.get_device_name(0)
        print(f"{where}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; engine after"
              f" {time.perf_counter() - begun:.0f} s; {asked.tokens} tokens: {num_pages * page / 2**20:.0f}"
              f" MiB of pages, {slot / 2**20:.0f} MiB of state\n", flush=True)  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            first_tokens(engine_dir, found, asked.rounds, Path(folder))
        beside_steps(engine_dir, found)


if __name__ == "__main__":
    main()
