"""What `make demo` shows: engines of the bundled checkpoints, a tritonserver, streams, a tool call."""

import json
import sys
import time
import urllib.request
from functools import partial
from pathlib import Path

from rich.console import Console

from hemiola import Client, Refused, SamplingParams
from hemiola.builder.build import Options, build
from hemiola.runtime import manifest
from hemiola.runtime.progress import show
from hemiola.runtime.serving.launcher import Server
from hemiola.runtime.serving.openai.front import Front
from hemiola.runtime.serving.openai.model import read_model

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = {
    "nemotron-h-code": "def read_lines(path):\n",
    "qwen3.5-code": "class Stack:\n    def __init__(self):\n",
}
TOGETHER = [
    f"def {verb}_{noun}(" for verb in ("read", "write") for noun in ("line", "header", "config", "value")
]
QUESTION = "Show me the documentation of os.path."
TOOL = {
    "name": "show_documentation",
    "parameters": {
        "type": "object",
        "properties": {
            "module": {"enum": ["os", "os.path", "pathlib", "shutil"]},
            "num_lines": {"type": "integer", "minimum": 1, "maximum": 99},
        },
        "required": ["module", "num_lines"],
        "additionalProperties": False,
    },
}
console = Console(highlight=False)


def say(line: str) -> None:
    console.print(line, style="dim", soft_wrap=True, markup=False)


def engine(name: str) -> Path:
    """The engine of a bundled checkpoint; kept from an earlier run while it still loads."""
    engine_dir = ROOT / "engines" / name
    try:
        manifest.load(engine_dir)
    except Refused:
        start = time.perf_counter()
        say(f"building {engine_dir.relative_to(ROOT)}")
        with show(True, say, sys.stdout) as report:
            build(ROOT / "demo" / name, engine_dir, Options(), report)
        say(f"built {engine_dir.relative_to(ROOT)} in {time.perf_counter() - start:.1f} s")
    return engine_dir


def stream(url: str, model: str, prompt: str) -> None:
    console.rule(f"{model}, greedy, over gRPC")
    console.print(prompt, style="bold", end="", markup=False)
    params = SamplingParams(max_tokens=96, temperature=0.0)
    with Client(url, model) as client:
        start, first, count = time.perf_counter(), 0.0, 0
        for piece in client.stream(prompt, params):
            first = first or time.perf_counter()
            count += len(piece.token_ids)
            console.print(piece.text, end="", markup=False, soft_wrap=True)
    end = time.perf_counter()
    rate = (count - 1) / (end - first)
    say(f"\n{count} tokens, first after {(first - start) * 1e3:.0f} ms, then {rate:.0f} tokens/s")


def together(url: str, model: str) -> None:
    """Requests share steps: what the model gives to all of them."""
    params = SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True)
    with Client(url, model) as client:
        start = time.perf_counter()
        count = sum(len(out.token_ids) for out in client.generate(TOGETHER, params))
        seconds = time.perf_counter() - start
    say(
        f"{len(TOGETHER)} requests at once: {count} tokens in {seconds * 1e3:.0f} ms,"
        f" {count / seconds:.0f} tokens/s"
    )


def call(url: str, model: str) -> None:
    """A tool call, streamed by the OpenAI-compatible front; a grammar keeps it to the tool's schema."""
    console.rule(f"{model}, a tool call, over {url}")
    console.print(QUESTION, style="bold", markup=False)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": TOOL["name"]}},
        "max_tokens": 96,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # our own server is behind no proxy
    with direct.open(request, timeout=60) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            for part in choice["delta"].get("tool_calls", ()):
                console.print(part["function"].get("name", ""), part["function"]["arguments"], end="", sep="")
            if choice["finish_reason"]:
                say(f"\nfinish reason: {choice['finish_reason']}")


def main() -> None:
    engines = {name: engine(name) for name in PROMPTS}
    start = time.perf_counter()
    say(f"starting tritonserver with {', '.join(engines)}")
    with Server(engines, start_timeout_s=900, show=partial(show, True, say, sys.stdout)) as server:
        ready = time.perf_counter() - start
        say(f"tritonserver serves them at {server.grpc_url} after {ready:.1f} s")
        for name, prompt in PROMPTS.items():
            stream(server.grpc_url, name, prompt)
            together(server.grpc_url, name)
        front = Front({name: read_model(name, engine_dir) for name, engine_dir in engines.items()})
        front.start(server.grpc_url, server.metrics_url)
        call(front.url, "qwen3.5-code")
        front.stop()
        say("stopping tritonserver")
    say("tritonserver stopped")


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
