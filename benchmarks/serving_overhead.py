"""What tritonserver and the Triton model cost: an engine whose steps only sleep; how many tokens arrive.

python benchmarks/serving_overhead.py [--streams 64 --step-ms 5 --tokens 400 --repeats 3]

The model is the product's, the LLM behind it is not: a thread says one token per stream and step. A client
in a process of its own reads all streams over one connection; each stream's ids are checked. CPU time is that
of all threads of the model's process, the LLM's included (a tenth), and of tritonserver, per token. Prints
rows for benchmarks/serving_overhead.md; half a minute.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from hemiola.runtime.serving import tritonserver
from hemiola.runtime.serving.launcher import Server
from hemiola.runtime.serving.tritonserver import find_model

NULL = """
import itertools, threading, time
from types import SimpleNamespace
from hemiola.runtime.api import Counters, Load, Metrics, Piece

class LLM:
    def __init__(self, engine_dir, **options):
        self.config = SimpleNamespace(max_rows=4096, num_drafts=0)
        self.counters = Counters()
        names = ("query_tokens hit_tokens page_hit_tokens num_snapshots refused_snapshots evicted_pages "
                 "evicted_snapshots stranded_snapshots")
        self.reuse = SimpleNamespace(**dict.fromkeys(names.split(), 0))
        self.ids, self.open, self.late = itertools.count(1), {}, 0.0
        threading.Thread(target=self.run, daemon=True).start()
    def encode(self, prompt): return list(prompt)
    def submit(self, ids, params, on_piece):
        number = next(self.ids)
        self.open[number] = [0, params.max_tokens, on_piece]
        return number
    def abort(self, number): pass
    def close(self): pass
    def load(self): return Load(len(self.open), 0, 1, 1, 0, 1, 1, 0.0, "")
    def run(self):
        due = time.perf_counter()
        while True:
            due = max(due + STEP_S, time.perf_counter() - STEP_S)
            time.sleep(max(0.0, due - time.perf_counter()))
            if len(self.open) < STREAMS and not any(said for said, _, _ in self.open.values()):
                continue  # all begin together
            for number, one in list(self.open.items()):
                one[0] += 1
                last = one[0] == one[1]
                if last:
                    del self.open[number]
                metrics = Metrics(1, 0.0) if last else None
                one[2](Piece("x", [one[0]], None, "length" if last else None, metrics))
"""
CLIENT = """
import sys
sys.argv = ["serving_overhead"]
from serving_overhead import read
import os
print(read(os.environ["URL"], int(os.environ["STREAMS"]), int(os.environ["TOKENS"])))
"""


def read(url: str, num_streams: int, num_tokens: int) -> str:
    """Seconds from the first token to the last, of streams of one connection."""
    answers: SimpleQueue[Any] = SimpleQueue()
    ids = grpcclient.InferInput("input_ids", [1], "INT64")
    ids.set_data_from_numpy(np.array([1], np.int64))
    found: dict[str, list[int]] = {}
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((time.monotonic(), result, error)))
        parameters = {"max_tokens": num_tokens, "stream": True}
        for number in range(num_streams):
            client.async_stream_infer(
                "null", [ids], request_id=f"{os.getpid()}-{number}", parameters=parameters
            )
        ended, first, last, num_responses = 0, 0.0, 0.0, 0
        while ended < num_streams:
            last, result, error = answers.get(timeout=120)
            assert error is None, error
            first = first or last
            num_responses += 1
            response = result.get_response()
            found.setdefault(response.id, []).extend(result.as_numpy("output_ids").tolist())
            ended += result.as_numpy("finish_reason") is not None
        client.stop_stream()
    assert all(said == list(range(1, num_tokens + 1)) for said in found.values()), (
        "tokens are lost or mixed up"
    )
    return json.dumps([first, last, num_responses])


class NullServer(Server):
    """The product's launcher and model with another LLM."""

    def __init__(self, llm: str) -> None:
        super().__init__({})
        self._llm = llm

    def start(self) -> None:
        self._settings = {"null": {"engine_dir": "none"}}
        source = find_model()
        folder = Path(tempfile.mkdtemp())
        (folder / "1").mkdir()
        text = (source / "1/model.py").read_text()
        assert "from hemiola.runtime.llm import LLM\n" in text
        (folder / "1/model.py").write_text(text.replace("from hemiola.runtime.llm import LLM\n", self._llm))
        (folder / "config.pbtxt").write_text((source / "config.pbtxt").read_text())
        tritonserver.find_model = lambda: folder
        super().start()


def cpu_s(pid: int) -> float:
    """Of all threads; the number is Linux' for a process' CPU clock."""
    return time.clock_gettime((~pid << 3) | 2)


def processes(server: Server) -> list[int]:
    """tritonserver, and the model's process."""
    assert server._process is not None
    pid = server._process.pid
    (stub,) = (
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if "python_backend_stub" in Path(f"/proc/{child}/cmdline").read_text()
    )
    return [pid, stub]


def row(server: Server, asked: argparse.Namespace) -> str:
    here = Path(__file__).resolve().parent
    settings = {"URL": server.grpc_url, "STREAMS": str(asked.streams), "TOKENS": str(asked.tokens)}
    paths = [str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | settings | {"PYTHONPATH": os.pathsep.join(paths)}
    pids = processes(server)
    before = [cpu_s(pid) for pid in pids]
    ran = subprocess.run([sys.executable, "-c", CLIENT], env=environment, capture_output=True, text=True)
    triton, model = (
        (cpu_s(pid) - was) / asked.streams / asked.tokens for pid, was in zip(pids, before, strict=True)
    )
    if ran.returncode:
        raise SystemExit(ran.stderr)
    first, last, num_responses = json.loads(ran.stdout)
    wanted, took = (asked.tokens - 1) * asked.step_ms / 1e3, last - first
    cells = [
        f"{os.getloadavg()[0]:.1f}",
        f"{asked.streams}",
        f"{asked.step_ms:g}",
        f"{asked.streams * asked.tokens / took:.0f}",
        f"{num_responses / took:.0f}",
        f"{took / (asked.tokens - 1) * 1e3:.2f}",
        f"{wanted / took:.1%}",
        f"{model * 1e6:.0f} us",
        f"{triton * 1e6:.0f} us",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    llm = NULL.replace("STEP_S", str(asked.step_ms / 1e3)).replace("STREAMS", str(asked.streams))
    heads = "load, streams, step ms, tokens/s, responses/s, ms per step, delivered"
    heads += ", model's CPU per token, tritonserver's"
    with NullServer(llm) as server:
        print(f"| {heads.replace(', ', ' | ')} |")
        print("|" + "---|" * len(heads.split(", ")))
        for _ in range(asked.repeats):
            print(row(server, asked), flush=True)


if __name__ == "__main__":
    main()
