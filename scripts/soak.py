"""Many callers who behave badly, for a while; then everything must be as it was, and every answer right.

python scripts/soak.py ENGINE_DIR --requests 5000 --kills 3     (or `make soak`)
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import requests
import typer
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from hemiola import LLM, Busy, Client, Lost, Refused, SamplingParams

KEY = "soak"
RETRY_S = 300.0  # for a server that is being killed or reloaded
BAD: tuple[dict[str, object], ...] = (
    {"text_input": "a", "max_tokens": 0},
    {"text_input": "a", "max_tokns": 3},
    {"input_ids": [10**9]},
    {"max_tokens": 3},
    {"text_input": "a", "logit_bias": "{"},
    {"text_input": ["a", "b"]},
)


class Served:
    """A `hemiola serve` that is ready."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "hemiola.runtime", "serve", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        said = ""
        assert self.process.stdout is not None
        while not re.search("^ready after", said, re.MULTILINE):
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit("hemiola serve did not start")
            said += line
        urls = {
            name: re.findall(rf"^{name} +(\S+)$", said, re.MULTILINE)[0]
            for name in ("HTTP", "gRPC", "metrics")
        }
        self.http_url = urls["HTTP"].partition("/v2/")[0]
        self.grpc_url, self.metrics_url = urls["gRPC"], urls["metrics"]
        self.openai_url = "".join(re.findall(r"^OpenAI +(\S+)$", said, re.MULTILINE))

    def pids(self) -> list[int]:
        return children(self.process.pid)

    def engine(self) -> int:
        """Not the small process beside it that ends it with its server."""
        (engine_pid,) = [
            pid
            for pid in self.pids()
            if "triton_python_backend_stub" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        return engine_pid


class Soak:
    def __init__(self, server: Served, llm: LLM, num_prompts: int, seed: int) -> None:
        self.server = server
        random_ = random.Random(seed)
        words = ["def ", "class ", "import os\n", "é😀 ", "return x", "    "]
        self.prompts = ["".join(random_.choices(words, k=random_.randint(1, 30))) for _ in range(num_prompts)]
        self.params = [
            SamplingParams(
                max_tokens=random_.randint(1, 60),
                ignore_eos=True,
                temperature=random_.choice([0.0, 0.8]),
                seed=i,
                num_drafts=random_.choice([None, 0]),
            )
            for i in range(num_prompts)
        ]
        self.expected = [out.token_ids for out in llm.generate(self.prompts, self.params)]
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self._clients = threading.local()
        self._connected: list[Client] = []

    def client(self) -> Client:
        if not hasattr(self._clients, "one"):
            self._clients.one = Client(self.server.grpc_url, retries=8)
            self._connected.append(self._clients.one)
        return self._clients.one

    def act(self, number: int, seed: int) -> None:
        random_ = random.Random(f"{seed} {number}")
        acts = [self.whole, self.streamed, self.left, self.slow, self.http, self.dropped, self.bad]
        act = random_.choices(acts, [30, 25, 15, 5, 10, 10, 5])[0]
        at = random_.randrange(len(self.prompts))
        end = time.monotonic() + RETRY_S
        while True:
            try:
                act(at, random_)
                self.count(act.__name__)
                return
            except (Lost, Busy, Refused, requests.RequestException, OSError) as error:
                self.count(f"again after {type(error).__name__}")
                if time.monotonic() > end:
                    self.note(f"{act.__name__} of prompt {at}: {error}")
                    return
                time.sleep(0.3)
            except RuntimeError as error:
                self.note(f"{act.__name__} of prompt {at}: {type(error).__name__}: {error}")
                return

    def run(
        self, num_requests: int, kills: int, reloads: int, callers: int, half_open: int, seed: int
    ) -> None:
        over = threading.Event()
        pace = num_requests / 60 / (kills + reloads + 1)
        disturbing = threading.Thread(target=disturb, args=[self.server, self, kills, reloads, over, pace])
        disturbing.start()
        host, port = self.server.http_url.removeprefix("http://").split(":")
        sockets = [socket.create_connection((host, int(port))) for _ in range(half_open)]
        with ThreadPoolExecutor(callers) as threads:
            list(threads.map(lambda number: self.act(number, seed), range(num_requests)))
        over.set()
        disturbing.join()
        for one in [*sockets, *self._connected]:
            one.close()

    def everything(self) -> None:
        """Every prompt once, by callers that behave."""
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(self._once, range(len(self.prompts))))

    def _once(self, at: int) -> None:
        with Client(self.server.grpc_url, retries=50) as client:
            self.check(at, client.generate([self.prompts[at]], self.params[at])[0].token_ids)
            self.count("plain")

    def count(self, what: str) -> None:
        with self._lock:
            self.done[what] += 1

    def note(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)

    def check(self, at: int, ids: list[int], whole: bool = True) -> None:
        told = self.expected[at]
        if ids != (told if whole else told[: len(ids)]):
            self.note(f"prompt {at}: {ids} instead of {told}")

    def whole(self, at: int, random_: random.Random) -> None:
        self.check(at, self.client().generate([self.prompts[at]], self.params[at])[0].token_ids)

    def streamed(self, at: int, random_: random.Random) -> None:
        pieces = list(self.client().stream(self.prompts[at], self.params[at]))
        self.check(at, [i for piece in pieces for i in piece.token_ids])

    def left(self, at: int, random_: random.Random) -> None:
        ids: list[int] = []
        stream = self.client().stream(self.prompts[at], self.params[at], request_id=f"s{random_.random()}")
        for piece in stream:
            ids += piece.token_ids
            if random_.random() < 0.3:
                break
        stream.close()
        self.check(at, ids, whole=False)

    def slow(self, at: int, random_: random.Random) -> None:
        ids: list[int] = []
        for piece in self.client().stream(self.prompts[at], self.params[at]):
            ids += piece.token_ids
            time.sleep(0.02)
        self.check(at, ids)

    def _post(self, endpoint: str, body: dict[str, object], stream: bool = False) -> requests.Response:
        url = f"{self.server.http_url}/v2/models/hemiola/{endpoint}"
        answer = requests.post(url, json=body, timeout=RETRY_S, stream=stream)
        if answer.status_code == 404:  # being reloaded
            raise Lost("no model")
        return answer

    def _body(self, at: int) -> dict[str, object]:
        return {
            "text_input": self.prompts[at],
            **self.params[at].model_dump(exclude_none=True, exclude_defaults=True),
        }

    def http(self, at: int, random_: random.Random) -> None:
        answer = self._post("generate", self._body(at)).json()
        if "OVERLOADED" in answer.get("error", ""):
            raise Busy(answer["error"])
        if "error" in answer:
            raise Lost(answer["error"])
        ids = answer["output_ids"]
        self.check(at, ids if isinstance(ids, list) else [ids])

    def dropped(self, at: int, random_: random.Random) -> None:
        """An event stream whose socket is closed in the middle."""
        with self._post("generate_stream", self._body(at) | {"stream": True}, stream=True) as answer:
            for _ in answer.iter_content(200):
                if random_.random() < 0.5:
                    break

    def bad(self, at: int, random_: random.Random) -> None:
        answer = self._post("generate", random_.choice(BAD))
        if answer.status_code == 503:  # it was killed meanwhile
            raise Lost(answer.text)
        if answer.status_code not in (400, 500) or not answer.json().get("error"):
            self.note(f"bad input was answered {answer.status_code} {answer.text[:100]}")


def children(pid: int) -> list[int]:
    pids = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            pids += [child, *children(child)]
    return pids


def resources(pids: list[int]) -> dict[str, int]:
    """Of some processes together."""
    total: Counter[str] = Counter()
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            links = [
                os.readlink(path)
                for path in Path(f"/proc/{pid}/fd").iterdir()
                if path.exists() or path.is_symlink()
            ]
        except OSError:
            continue  # it has ended since it was counted
        resident = re.findall(r"VmRSS:\s+(\d+)", status)
        if not resident:
            continue  # it has ended, and nobody has asked how
        total["threads"] += int(re.findall(r"Threads:\s+(\d+)", status)[0])
        total["memory, MiB"] += int(resident[0]) // 1024
        total["sockets"] += sum(link.startswith("socket:") for link in links)
    return dict(total)


SLACK = {"threads": 8, "sockets": 12, "memory, MiB": 150}  # an engine that was started again differs a little


def too_much(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] for name, slack in SLACK.items() if after[name] > before[name] + slack}


def settled(server: Served, before: dict[str, int]) -> dict[str, int]:
    """The resources, once connections that were closed are gone."""
    for _ in range(30):
        time.sleep(1)
        after = resources(server.pids())
        if not too_much(before, after):
            break
    return after


def levels(server: Served) -> dict[str, float]:
    """Gauges of requests, pages and slots."""
    text = requests.get(server.metrics_url, timeout=10).text
    lines = re.findall(
        r"^hemiola_(requests_running|requests_waiting|pages|slots)\{(.*?)\} (\S+)$", text, re.MULTILINE
    )
    return {
        f"{name} {''.join(re.findall('state=.(.*?).(?:,|$)', labels))}".strip(): float(value)
        for name, labels, value in lines
    }


def idle(server: Served) -> dict[str, float]:
    """Once nothing runs: what must then be."""
    end = time.monotonic() + 60
    while True:
        now = levels(server)
        busy = {
            n: now.get(n) for n in ("requests_running", "requests_waiting", "pages used", "slots running")
        }
        if not any(busy.values()) and None not in busy.values():
            return now
        if time.monotonic() > end:
            raise SystemExit(f"still busy: {busy}")
        time.sleep(0.3)


def disturb(
    server: Served, soak: Soak, kills: int, reloads: int, over: threading.Event, seconds: float
) -> None:
    """Kills of the engine's process and reloads, one after the other, while requests run."""
    acts = ["kill"] * kills + ["reload"] * reloads
    random.Random(0).shuffle(acts)
    for act in acts:
        if over.wait(seconds):
            return
        while not (done := hurt(server, act)) and not over.wait(1):
            pass  # what the last one broke is not whole yet
        soak.count(act if done else f"{act} that came too late")


def hurt(server: Served, act: str) -> bool:
    try:
        if act == "kill":
            requests.get(f"{server.http_url}/v2/health/ready", timeout=RETRY_S).raise_for_status()
            os.kill(server.engine(), signal.SIGKILL)
            return True
        key = {"triton-grpc-protocol-hemiola-key": KEY}
        with InferenceServerClient(server.grpc_url) as control:
            control.unload_model("hemiola", headers=key, client_timeout=RETRY_S)
            control.load_model("hemiola", headers=key, client_timeout=RETRY_S)
        return True
    except (OSError, ValueError, requests.RequestException, InferenceServerException):
        return False


def main(
    engine_dir: Path,
    num_requests: Annotated[int, typer.Option("--requests")] = 3000,
    kills: int = 2,
    reloads: int = 2,
    callers: int = 12,
    half_open: int = 50,
    seed: int = 0,
) -> None:
    """Exit status 1 if an answer was wrong, a request was lost or something is left behind."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    limits = ["--max-queue=6", f"--restart={kills + 1}", f"--control-key={KEY}", "--hang-timeout=60"]
    server = Served(f"--engine-dir={engine_dir}", *ports, *limits)
    try:
        with LLM(engine_dir) as llm:
            soak = Soak(server, llm, 64, seed)
        soak.everything()  # warm, before anything is counted
        before = resources(server.pids())
        start = time.monotonic()
        soak.run(num_requests, kills, reloads, callers, half_open, seed)
        seconds = time.monotonic() - start
        soak.everything()
        gauges = idle(server)
        after = settled(server, before)
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(60)
    finally:
        server.process.kill()
    print(table(soak, before, after, gauges, seconds))
    if status != 0:
        soak.note(f"hemiola serve ended with {status}")
    for name, value in too_much(before, after).items():
        soak.note(f"{name}: {before[name]} before, {value} after")
    if soak.wrong:
        print("\n".join(soak.wrong[:20]), file=sys.stderr)
        raise SystemExit(1)


def table(
    soak: Soak, before: dict[str, int], after: dict[str, int], gauges: dict[str, float], seconds: float
) -> str:
    rows: list[tuple[str, Any]] = [*sorted(soak.done.items()), ("seconds", round(seconds))]
    rows += [(f"{name}, before and after", f"{before[name]}, {after[name]}") for name in before]
    rows += [(f"{name}, at the end", int(value)) for name, value in sorted(gauges.items())]
    rows += [("wrong or lost", len(soak.wrong))]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


if __name__ == "__main__":
    typer.run(main)
