"""What Dynamo's adapter (runtime/dynamo/engine.py) adds to an LLM: benchmarks/cluster.md.

    PYTHONPATH=. python benchmarks/adapter_overhead.py [--rounds 7] [--streams 32]

A bundled model on the CPU, asked by LLM.submit, with and without text, and through the adapter, in turns:
milliseconds to the first token of one request alone, and tokens a second of so many streams. Dynamo itself is
not part of it: what Rust does before and behind the adapter is the same for every engine. The tokens of all
must be equal.
"""

import argparse
import asyncio
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from hemiola.builder.build import Options, build
from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.dynamo.binding import Errors
from hemiola.runtime.dynamo.engine import DynamoEngine, WorkerBounds
from hemiola.runtime.llm import LLM

MODEL = Path(__file__).resolve().parents[1] / "demo/qwen3.5-code"
ALONE, TOKENS = 40, 128  # requests of a round, one after the other; tokens of a stream
NAMES = ("LLM", "LLM, no text", "adapter")
Asked = tuple[list[float], list[list[int]]]  # seconds to the first tokens, and all tokens


class Call:
    """Dynamo's context."""

    def __init__(self, name: str) -> None:
        self.id = lambda: name


def by_llm(llm: LLM, prompts: list[list[int]], num_tokens: int, wants_text: bool) -> Asked:
    """All at once."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    firsts: list[float] = [0.0] * len(prompts)
    ids: list[list[int]] = [[] for _ in prompts]
    left = threading.Semaphore(0)

    def note(n: int, piece: Piece) -> None:
        firsts[n] = firsts[n] or time.perf_counter() - start
        ids[n] += piece.token_ids
        if piece.finish_reason is not None:
            left.release()

    start = time.perf_counter()
    for n, prompt in enumerate(prompts):
        llm.submit(prompt, params, lambda piece, n=n: note(n, piece), wants_text=wants_text)
    for _ in prompts:
        left.acquire()
    return firsts, ids


async def by_adapter(engine: DynamoEngine, prompts: list[list[int]], num_tokens: int) -> Asked:
    async def one(n: int, prompt: list[int]) -> tuple[float, list[int]]:
        first, ids = 0.0, []
        request = {
            "token_ids": prompt,
            "stop_conditions": {"max_tokens": num_tokens, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0},
        }
        start = time.perf_counter()  # a task of its own is Dynamo's, too
        async for chunk in engine.generate(request, Call(str(n))):
            first = first or time.perf_counter() - start
            ids += chunk["token_ids"]
        return first, ids

    found = await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts)))
    return [first for first, _ in found], [ids for _, ids in found]


async def measure(engine: DynamoEngine, llm: LLM, rounds: int, streams: int) -> None:
    """Of each prompt, and of all streams together, the best round of each: what else the machine does is in
    the others."""
    text = llm.encode(Path(argparse.__file__).read_text()[:40_000], must_fit=False)
    prompts = [text[20 * n : 20 * n + 40] for n in range(max(streams, ALONE))]

    async def ask(name: str, asked: list[list[int]], num_tokens: int) -> Asked:
        if name == "adapter":
            return await by_adapter(engine, asked, num_tokens)
        return await asyncio.to_thread(by_llm, llm, asked, num_tokens, name == "LLM")

    firsts: dict[str, list[list[float]]] = {name: [] for name in NAMES}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    busy: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(rounds + 1):
        names = NAMES[number % 3 :] + NAMES[: number % 3]
        alone: dict[str, list[Asked]] = {name: [] for name in NAMES}
        for prompt in prompts[:ALONE]:
            for name in names:
                alone[name].append(await ask(name, [prompt], 4))
        assert all([ids for _, ids in alone[name]] == [ids for _, ids in alone["LLM"]] for name in NAMES)
        together: dict[str, list[list[int]]] = {}
        for name in names:
            start, worked = time.perf_counter(), time.process_time()
            _, together[name] = await ask(name, prompts[:streams], TOKENS)
            if number:  # the first round loads what a first time needs
                seconds[name].append(time.perf_counter() - start)
                busy[name].append(time.process_time() - worked)
                firsts[name].append([1e3 * first[0] for first, _ in alone[name]])
        assert all(together[name] == together["LLM"] for name in NAMES)
    first = {name: np.array(found).min(0) for name, found in firsts.items()}
    speed = {name: streams * TOKENS / min(found) for name, found in seconds.items()}
    cpu = {name: 1e6 * min(found) / (streams * TOKENS) for name, found in busy.items()}
    print(f"| | {' | '.join(NAMES)} | adapter to LLM |\n|---|---|---|---|---|")
    cells = " | ".join(f"{np.median(first[name]):.2f}" for name in NAMES)
    more = np.median(first["adapter"] - first["LLM"])
    print(f"| first token, ms, median of {ALONE} prompts | {cells} | {more:+.2f} ms |")
    for what, found in ((f"tokens/s of {streams} streams", speed), ("CPU time, us a token", cpu)):
        cells = " | ".join(f"{found[name]:,.0f}" for name in NAMES)
        print(f"| {what} | {cells} | {found['adapter'] / found['LLM'] - 1:+.1%} |")


async def run(engine_dir: Path, rounds: int, streams: int) -> None:
    opened: list[LLM] = []

    def open_llm() -> LLM:
        opened.append(LLM(engine_dir, drafts="none", prefix_cache=False, max_rows=streams))
        return opened[0]

    errors = Errors(ValueError, RuntimeError, RuntimeError, RuntimeError)
    engine = DynamoEngine(open_llm, id, errors, WorkerBounds(), lambda reason: None)
    await engine.start(1)
    await measure(engine, opened[0], rounds, streams)
    await engine.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=32)
    asked = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as folder:
        build(MODEL, Path(folder) / "engine", Options(max_len=512, max_rows=asked.streams))
        asyncio.run(run(Path(folder) / "engine", asked.rounds, asked.streams))


if __name__ == "__main__":
    main()
