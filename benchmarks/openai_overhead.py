"""What the OpenAI front adds to the first token, and what it costs per request and per token.

    PYTHONPATH=.:tests python benchmarks/openai_overhead.py [--streams 8] [--rounds 40] [--tokens 40]

Prints a row for benchmarks/openai_front.md; 40 rounds take a minute and a half.

A scripted tritonserver (tests/kit/scripted_triton.py) answers every request with a token each 5 ms, in a
process of its own; the front runs in another. As many streams as asked for run at any time, over gRPC and,
turn by turn, over the front's chats; they begin one after the other, as users' do. Who asks gRPC renders and
encodes the chat itself, as the front does. Goal: <= 1 ms more at the first tokens' median, <= 5 ms more at
the 99th percentile. On a busy machine the quietest rounds say most, and CPU time, the front's process and all
its threads: of the same rounds and of as many with one token per request.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
from kit import checkpoints
from kit.scripted_triton import ScriptedTriton, script

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.serving.openai.front import Front
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.serving.packing import channel_options
from hemiola.runtime.serving.wire import Pieces, Wire
from hemiola.runtime.text import Text

STEP_S, PER_STREAM = 0.005, 3
MESSAGES = [{"role": "user", "content": "import os\n" * 40}]


def load_text() -> Text:
    folder = Path(tempfile.mkdtemp())
    checkpoints.write_tokenizer(folder)
    return Text(folder)


def words_of(num_tokens: int) -> list[str]:
    return [f" w{i}" for i in range(num_tokens)]


def freeze() -> None:
    """As `hemiola serve` does: a full collection would stop a process for 0.07 s."""
    gc.collect()
    gc.freeze()


def run_triton(pipe: Connection, num_tokens: int) -> None:
    with ScriptedTriton() as triton:
        triton.script, triton.pause_s = script(*words_of(num_tokens)), STEP_S
        pipe.send(triton.url)
        while num_tokens := pipe.recv():
            triton.script = script(*words_of(num_tokens))
            pipe.send(num_tokens)


def run_front(pipe: Connection, url: str) -> None:
    front = Front({"tiny": ServedModel("tiny", 4096, "0" * 64, load_text())})
    front.start(url, "http://127.0.0.1:1/metrics")
    freeze()
    pipe.send(front.url)
    pipe.recv()
    front.stop()


def cpu_s(pid: int) -> float:
    """Of all threads; the number is Linux' for a process' CPU clock."""
    return time.clock_gettime((~pid << 3) | 2)


async def ask_grpc(wire: Wire, encoder: Text, num_tokens: int) -> tuple[float, str]:
    start, first, text = time.perf_counter(), 0.0, ""

    async def take(pieces: Pieces) -> None:
        nonlocal first, text
        first = first or time.perf_counter()
        text += "".join(piece.text for _, piece in pieces)

    ids = encoder.encode(encoder.chat(MESSAGES))
    await wire.ask(wire.pack("tiny", [(ids, SamplingParams(max_tokens=num_tokens))])).each(take)
    return first - start, text


async def ask_front(session: aiohttp.ClientSession, url: str, num_tokens: int) -> tuple[float, str]:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": num_tokens, "stream": True}
    start, first, text = time.perf_counter(), 0.0, ""
    async with session.post(f"{url}/chat/completions", json=body) as answer:
        async for line in answer.content:
            first = first or time.perf_counter()
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
    return first - start, text


async def burst(
    streams: int, num_tokens: int, ask: Callable[[], Awaitable[tuple[float, str]]]
) -> list[float]:
    """Times to the first token of PER_STREAM requests of each stream."""

    async def one(index: int) -> list[float]:
        await asyncio.sleep(index * STEP_S * num_tokens / streams)
        found = [await ask() for _ in range(PER_STREAM)]
        assert all(said == "".join(words_of(num_tokens)) for _, said in found)
        return [first for first, _ in found]

    return [first for each in await asyncio.gather(*map(one, range(streams))) for first in each]


async def measure(
    grpc_url: str, front_url: str, front_pid: int, streams: int, rounds: int, num_tokens: int
) -> tuple[list[tuple[list[float], ...]], float]:
    """First tokens of each round by gRPC and by the front, and the front's seconds of CPU per request."""
    wire, encoder = Wire(grpc_url, channel_options(grpc_url)), load_text()
    found, spent = [], 0.0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(rounds + 1):
            direct = await burst(streams, num_tokens, lambda: ask_grpc(wire, encoder, num_tokens))
            before = cpu_s(front_pid)
            fronted = await burst(streams, num_tokens, lambda: ask_front(session, front_url, num_tokens))
            if number:  # the first one warms up
                spent += cpu_s(front_pid) - before
                found.append((direct, fronted))
    await wire.close()
    return found, spent / (streams * rounds * PER_STREAM)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] * 1e3


def row(rounds: list[tuple[list[float], ...]], per_request: float, per_token: float) -> str:
    quiet = sorted(rounds, key=lambda both: sum(map(sum, both)))[: max(len(rounds) // 2, 1)]
    cells = [f"{os.getloadavg()[0]:.1f}"]
    for chosen in (rounds, quiet):
        ways = [[first for both in chosen for first in both[way]] for way in (0, 1)]
        for share in (0.5, 0.99):
            grpc, fronted = (percentile(way, share) for way in ways)
            cells.append(f"{grpc:.2f} -> {fronted:.2f}, **{fronted - grpc:+.2f}**")
    cells += [f"{per_request * 1e3:.2f} ms", f"{per_token * 1e3:.3f} ms"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    triton_pipe, triton_end = spawn.Pipe()
    front_pipe, front_end = spawn.Pipe()
    triton = spawn.Process(target=run_triton, args=(triton_end, options.tokens), daemon=True)
    triton.start()
    grpc_url = triton_pipe.recv()
    front = spawn.Process(target=run_front, args=(front_end, grpc_url), daemon=True)
    front.start()
    freeze()
    given = (grpc_url, front_pipe.recv(), front.pid or 0, *vars(options).values())
    rounds, whole = asyncio.run(measure(*given))
    triton_pipe.send(1)
    triton_pipe.recv()
    _, per_request = asyncio.run(measure(*given[:-1], 1))
    print(
        "| load | p50, ms: gRPC -> front, adds | p99 | p50 of the quietest half | p99"
        " | CPU per request | per token |"
    )
    print("|---|---|---|---|---|---|---|")
    print(row(rounds, per_request, (whole - per_request) / (options.tokens - 1)))
    for pipe, process in ((front_pipe, front), (triton_pipe, triton)):
        pipe.send(0)
        process.join(10)


if __name__ == "__main__":
    main()
