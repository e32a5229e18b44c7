"""What the OpenAI front adds to the first token, and what it costs per request and per event.

    PYTHONPATH=.:tests python benchmarks/openai_overhead.py [--streams 8] [--rounds 40] [--tokens 40]

A scripted tritonserver (tests/kit/scripted_triton.py) answers every request with a token each 5 ms, in a
process of its own; the front runs in another. As many streams as asked for run at any time, over gRPC and,
turn by turn, over the front's chats; they begin one after the other, as users' do. Who asks gRPC renders and
encodes the chat itself, as the front does. Goal: <= 1 ms more at the first tokens' median, <= 5 ms more at
the 99th percentile. On a busy machine the quietest rounds say most. CPU time is counted by the kernel.
"""

import argparse
import asyncio
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
from hemiola.runtime.serving.openai.model import Model
from hemiola.runtime.serving.openai.wire import Wire
from hemiola.runtime.text import Text

STEP_S, PER_STREAM = 0.005, 3
MESSAGES = [{"role": "user", "content": "import os\n" * 40}]


def load_text() -> Text:
    folder = Path(tempfile.mkdtemp())
    checkpoints.write_tokenizer(folder)
    return Text(folder)


def words_of(num_tokens: int) -> list[str]:
    return [f" w{i}" for i in range(num_tokens)]


def run_triton(pipe: Connection, num_tokens: int) -> None:
    with ScriptedTriton() as triton:
        triton.script, triton.pause_s = script(*words_of(num_tokens)), STEP_S
        pipe.send(triton.url)
        pipe.recv()


def run_front(pipe: Connection, url: str) -> None:
    front = Front({"tiny": Model("tiny", 4096, "0" * 64, load_text())})
    front.start(url, "http://127.0.0.1:1/metrics")
    pipe.send(front.url)
    pipe.recv()
    front.stop()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ask_grpc(wire: Wire, encoder: Text, num_tokens: int) -> tuple[float, str]:
    start, first, text = time.perf_counter(), 0.0, ""
    ids = encoder.encode(encoder.chat(MESSAGES))
    answers = wire.ask("tiny", [(ids, SamplingParams(max_tokens=num_tokens))])
    while found := await answers.next():
        first = first or time.perf_counter()
        text += "".join(piece.text for _, piece in found)
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
    grpc_url: str, front_url: str, streams: int, rounds: int, num_tokens: int
) -> list[tuple[list[float], ...]]:
    wire, encoder = Wire(grpc_url), load_text()
    found = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for _ in range(rounds + 1):
            direct = await burst(streams, num_tokens, lambda: ask_grpc(wire, encoder, num_tokens))
            fronted = await burst(streams, num_tokens, lambda: ask_front(session, front_url, num_tokens))
            found.append((direct, fronted))
    await wire.close()
    return found[1:]  # the first one warms up


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=40, help="1: what a first token costs the front")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    triton_pipe, triton_end = spawn.Pipe()
    front_pipe, front_end = spawn.Pipe()
    triton = spawn.Process(target=run_triton, args=(triton_end, options.tokens), daemon=True)
    triton.start()
    grpc_url = triton_pipe.recv()
    front = spawn.Process(target=run_front, args=(front_end, grpc_url), daemon=True)
    front.start()
    front_url = front_pipe.recv()
    before = cpu_s(front.pid or 0)
    rounds = asyncio.run(measure(grpc_url, front_url, *vars(options).values()))
    spent = cpu_s(front.pid or 0) - before
    requests = options.streams * (options.rounds + 1) * PER_STREAM
    for name, chosen in (
        ("all rounds", rounds),
        ("quietest half", sorted(rounds, key=lambda both: sum(map(sum, both)))[: len(rounds) // 2]),
    ):
        ways = [[first for both in chosen for first in both[way]] for way in (0, 1)]
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            grpc, fronted = (percentile(way, share) for way in ways)
            added = f"front {fronted:6.2f} ms, adds {fronted - grpc:5.2f} ms"
            print(f"{name:14} {label}: gRPC {grpc:6.2f} ms, {added}")
    print(f"front's CPU: {spent / requests * 1e3:.2f} ms per request of {options.tokens} tokens")
    print(f"load average: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for pipe, process in ((front_pipe, front), (triton_pipe, triton)):
        pipe.send("end")
        process.join(10)


if __name__ == "__main__":
    main()
