"""Can one engine's process be lost, and come back, while the others of its tritonserver stream on?

python benchmarks/lost_engine.py ENGINE_DIR [--rounds 3]
Kills one of two engines under streams, reloads it by Triton's own control, and says who is heard of again.
"""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Annotated

import requests
import typer
from tritonclient.grpc import InferenceServerClient

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.serving import heartbeat
from hemiola.runtime.serving.client import Client
from hemiola.runtime.serving.launcher import Server
from hemiola.runtime.serving.tritonserver import KEY_HEADER

KEY = "probe"
WAIT_S = 20.0  # for streams to end
TOKENS = 1500


class Caller:
    """A stream in a thread of its own."""

    def __init__(self, server: Server, model: str, door: str) -> None:
        self.what = f"{door} of {model}"
        self.num_events = 0
        self.end = "silent for ever"
        self.thread = threading.Thread(target=self._run, args=[server, model, door], daemon=True)
        self.thread.start()

    def _run(self, server: Server, model: str, door: str) -> None:
        try:
            for _ in {"gRPC": grpc, "HTTP": http}[door](server, model):
                self.num_events += 1
            self.end = "whole"
        except Exception as error:
            self.end = f"{type(error).__name__}: {error}"[:100]


def grpc(server: Server, model: str):
    with Client(server.grpc_url, model, retries=0) as client:
        yield from client.stream("def ", SamplingParams(max_tokens=TOKENS, ignore_eos=True))


def http(server: Server, model: str):
    body = {"text_input": "def ", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    url = f"{server.http_url}/v2/models/{model}/generate_stream"
    yield from filter(None, requests.post(url, json=body, stream=True, timeout=600).iter_lines(chunk_size=1))


def reload(server: Server) -> float:
    start = time.monotonic()
    with InferenceServerClient(server.grpc_url) as control:
        control.unload_model("dies", headers={f"triton-grpc-protocol-{KEY_HEADER}": KEY})
        control.load_model("dies", headers={f"triton-grpc-protocol-{KEY_HEADER}": KEY})
    return time.monotonic() - start


def one_round(server: Server) -> None:
    beat = heartbeat.read(server._beats()[0])
    assert beat is not None
    callers = [Caller(server, m, door) for m in ("dies", "lives") for door in ("gRPC", "HTTP") * 2]
    while not all(caller.num_events > 2 for caller in callers):
        time.sleep(0.05)
    os.kill(beat.pid, signal.SIGKILL)
    time.sleep(1)
    print(f"unloaded and loaded in {reload(server):.1f} s")
    with Client(server.grpc_url, "dies", retries=0) as client:
        client.generate(["def "], SamplingParams(max_tokens=4))
        print("the lost engine answers again")
    for caller in callers[4:]:
        caller.thread.join(300)
    callers[0].thread.join(WAIT_S)
    for caller in callers:
        print(f"  {caller.what}: {caller.num_events} events, then {caller.end}")


def main(engine_dir: Path, rounds: Annotated[int, typer.Option()] = 3) -> None:
    with Server({"dies": engine_dir, "lives": engine_dir}, control_key=KEY, exit_timeout_s=5) as server:
        for _ in range(rounds):
            one_round(server)
        assert server._process is not None
        server._process.terminate()
        time.sleep(WAIT_S)
        print(f"told to end, {WAIT_S:.0f} s later tritonserver's status: {server._process.poll()}")
        server.kill()


if __name__ == "__main__":
    typer.run(main)
