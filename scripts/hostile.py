"""The dearest legal requests beside ordinary ones: how much longer do the ordinary ones wait for a token?

python scripts/hostile.py ENGINE_DIR     (`make soak` runs it behind soak.py)

For each field, two ordinary streams run beside callers whose requests are as dear in that field as the server
takes, and beside callers whose requests have the same prompts, answers and lengths without it. The two phases
of a pair follow each other at once, in another order each time, so that other load on the machine strikes
both alike. A pair's ratio is that of the 99th percentiles of the time between two tokens of the ordinary
streams; a field's is the median of its pairs, and must stay under 2. The lowest and the highest pair show the
spread. Ids are compared with the plain run's. Exit status 1 if a field costs more, or a token differs.
"""

import json
import os
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import requests
import typer
from soak import RETRY_S, Served

from hemiola import LLM, Client, SamplingParams
from hemiola.runtime.api import MAX_CHARACTERS, MAX_ENTRIES, MAX_WORD_IDS

MAX_RATIO = 2.0
PROMPT = "def read_lines(path):\n"
ORDINARY = SamplingParams(max_tokens=300, ignore_eos=True, num_drafts=0)
NUM_STREAMS = 2
NUM_CALLERS = 2
N = 8  # answers of each dear request
WORD_LEN = 4
NUM_LONG = 1000  # tokens, about, of a long prompt
Body = dict[str, Any]
TEXT: Body = {"text_input": PROMPT, "n": N, "max_tokens": ORDINARY.max_tokens, "ignore_eos": True}
OPENAI: Body = {"model": "hemiola", "n": N, "max_tokens": ORDINARY.max_tokens, "ignore_eos": True}
COMPLETION = OPENAI | {"prompt": PROMPT, "temperature": 0}
ASKS = [{"role": "user", "content": PROMPT}]
CHAT = OPENAI | {"messages": ASKS, "temperature": 0}
RESPONSE: Body = {"model": "hemiola", "input": PROMPT, "max_output_tokens": 16, "temperature": 0}


class Dear(NamedTuple):
    """What a request adds that is as dear as is served, to what it is beside."""

    more: Body
    plain: Body = TEXT
    route: str = ""  # of the OpenAI port; "": Triton's generate
    fresh: bool = False  # no prompt of either side is cached
    refused: bool = False  # once it is read

    @property
    def dear(self) -> Body:
        """A grammar must be able to end, and a prompt is given once."""
        ends = {"structured_outputs", "response_format", "tool_choice"} & self.more.keys()
        drops = "ignore_eos" if ends else "text_input" if "messages" in self.more else ""
        return {name: value for name, value in (self.plain | self.more).items() if name != drops}


# By field: why no value of it is dearer than another, or which entry has it.
NO_DEARER = {
    **dict.fromkeys(("max_tokens", "ignore_eos", "n", "text_input"), "both sides have it"),
    **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "as max_tokens"),
    **dict.fromkeys(("stream", "chat", "return_input_ids", "return_metrics", "error_data"), "a flag"),
    **dict.fromkeys(("exclude_input_in_output", "return_token_ids", "store", "background"), "a flag"),
    **dict.fromkeys(("seed", "priority", "timeout", "num_drafts", "best_of"), "a number that costs nothing"),
    **dict.fromkeys(("temperature", "min_p"), "with top_p"),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), "with repetition_penalty"),
    "min_tokens": "with stop_token_ids",
    "return_log_probs": "as logprobs of 0",
    "input_ids": "as text_input",
    **dict.fromkeys(("model", "suffix", "stream_options", "modalities", "service_tier"), "known values only"),
    **dict.fromkeys(("previous_response_id", "conversation", "include", "truncation"), "known values only"),
    **dict.fromkeys(("reasoning", "reasoning_effort", "verbosity"), "known values only"),
    **dict.fromkeys(
        ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), "as metadata"
    ),
    "instructions": "as input",
    "text": "as response_format",
    **dict.fromkeys(("tool_choice", "parallel_tool_calls"), "with tools"),
    "chat_template_kwargs": "names that the template reads",
}


def dearest(vocab_size: int) -> dict[str, Dear]:
    """By field."""
    some = [(7 * i) % vocab_size for i in range(MAX_ENTRIES)]
    words = [[some[(i + j) % MAX_ENTRIES] for j in range(WORD_LEN)] for i in range(MAX_WORD_IDS // WORD_LEN)]
    stops = ["\n" + "x" * 30 + chr(33 + i) for i in range(MAX_CHARACTERS["stop"] // 32)]
    long_word = {"type": "string", "maxLength": 500}
    names = [f"p{i}" for i in range(50)]  # all required: an answer is as long as one without a grammar
    schema = {"type": "object", "properties": dict.fromkeys(names, long_word), "required": names}
    long_text = PROMPT * (NUM_LONG // 9)
    talk = [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(NUM_LONG // 10)]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    wanted = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    items = [{"role": "assistant", "content": "x" * 900} for _ in range(16_000)]  # 15 MB
    return {
        "bad_words": Dear({"bad_words": [f"w{i:03d}" for i in range(MAX_WORD_IDS // 8)]}),
        "bad_words_ids": Dear({"bad_words_ids": json.dumps(words)}),
        "logit_bias": Dear({"logit_bias": json.dumps({str(i): -0.01 for i in dict.fromkeys(some)})}),
        "stop": Dear({"stop": stops}),
        "stop_token_ids": Dear({"stop_token_ids": sorted(set(some)), "min_tokens": ORDINARY.max_tokens}),
        "repetition_penalty": Dear(
            {"repetition_penalty": 1.01, "frequency_penalty": 0.01, "presence_penalty": 0.01}
        ),
        "logprobs": Dear({"logprobs": 20}),
        "prompt_logprobs": Dear({"prompt_logprobs": 20}, TEXT | {"text_input": long_text}, fresh=True),
        "top_p": Dear({"temperature": 1.5, "top_p": 0.999, "min_p": 1e-9}),
        "top_k": Dear({"temperature": 1.5, "top_p": 0.999, "top_k": vocab_size - 1}),
        "structured_outputs": Dear({"structured_outputs": json.dumps({"json": schema})}),
        "structured_outputs, choices": Dear(
            {"structured_outputs": json.dumps({"choice": [f"choice {i:05d}" for i in range(10_000)]})},
            TEXT | {"max_tokens": 9},  # as long as a choice
        ),
        "structured_outputs, regex": Dear(
            {"structured_outputs": json.dumps({"regex": "([a-z]+[ ,]){1,200}([0-9a-f]{2}|é|日)*"})}
        ),
        "cache_salt": Dear({"cache_salt": "s" * MAX_CHARACTERS["cache_salt"]}),
        "messages": Dear({"messages": json.dumps(talk)}, TEXT | {"text_input": long_text}),
        "cancel": Dear({"cancel": [f"nobody {i}" for i in range(MAX_ENTRIES)]}, {"cancel": ["nobody"]}),
        # The OpenAI port. What is dropped or refused is read before.
        "prompt": Dear({"prompt": [PROMPT] * N, "n": 1}, COMPLETION, "completions"),
        "echo": Dear(
            {"echo": True, "logprobs": 20},
            COMPLETION | {"prompt": long_text, "n": 1},
            "completions",
            fresh=True,
        ),
        "top_logprobs": Dear({"logprobs": True, "top_logprobs": 20}, CHAT, "chat/completions"),
        "tools": Dear(
            {"tools": [tool], "tool_choice": "required", "messages": ASKS},
            # whose prompt is as long: a template writes the tools down
            CHAT | {"max_tokens": 100, "messages": [{"role": "system", "content": json.dumps(tool)}, *ASKS]},
            "chat/completions",
        ),
        "response_format": Dear({"response_format": wanted}, CHAT, "chat/completions"),
        "metadata": Dear({"metadata": {str(i): "x" for i in range(60_000)}}, RESPONSE, "responses"),
        "input": Dear({"input": items}, RESPONSE, "responses", refused=True),
    }


class Callers:
    """Post one body again and again until they are ended."""

    def __init__(self, server: Served, case: Dear, body: Body) -> None:
        generate = f"{server.http_url}/v2/models/hemiola/generate"
        self._url = f"{server.openai_url}/{case.route}" if case.route else generate
        self._case = case
        self._body = json.dumps(body).encode()  # once: the streams are read in this process, too
        self._over = threading.Event()
        self.failure = ""
        self._ended = [0]
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_CALLERS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        allowed = {200, 429, 400} if self._case.refused else {200, 429}
        while not self._over.is_set():
            salt = json.dumps({"cache_salt": uuid.uuid4().hex})[1:-1]
            data = self._body[:-1] + f", {salt}}}".encode() if self._case.fresh else self._body
            answer = requests.post(self._url, data=data, timeout=RETRY_S)
            if answer.status_code not in allowed and "OVERLOADED" not in answer.text:
                self.failure = f"a dear request was refused: {answer.text[:300]}"
                return
            self._ended[0] += 1

    def wait(self) -> None:
        """Until one answer is there: grammars are compiled, prompts are cached."""
        while not self._ended[0] and any(thread.is_alive() for thread in self._threads):
            time.sleep(0.05)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        if self.failure:
            raise SystemExit(self.failure)


def gaps(server: Served, expected: list[int], case: Dear) -> list[float]:
    """Seconds between tokens of the ordinary streams, which come through the same door."""

    def at_openai(_: int) -> list[float]:
        seconds, ids, last = [], [], 0.0
        body = COMPLETION | {"n": 1, "num_drafts": 0, "stream": True, "return_token_ids": True}
        url = f"{server.openai_url}/completions"
        with requests.post(url, json=body, stream=True, timeout=RETRY_S) as answer:
            for line in answer.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                more = [t for c in json.loads(line[6:])["choices"] for t in c.get("token_ids") or ()]
                if ids and more:
                    seconds += [(now - last) / len(more)] * len(more)
                ids, last = ids + more, now
        if ids != expected:
            raise SystemExit("an ordinary stream has other tokens than its plain run")
        return seconds

    def at_triton(_: int) -> list[float]:
        seconds, ids, last = [], [], 0.0
        with Client(server.grpc_url, retries=50) as client:
            for piece in client.stream(PROMPT, ORDINARY):
                now = time.perf_counter()
                if ids and piece.token_ids:
                    seconds += [(now - last) / len(piece.token_ids)] * len(piece.token_ids)
                ids, last = ids + piece.token_ids, now
        if ids != expected:
            raise SystemExit("an ordinary stream has other tokens than its plain run")
        return seconds

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        one = at_openai if case.route else at_triton
        return [gap for part in threads.map(one, range(NUM_STREAMS)) for gap in part]


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


class Compared(NamedTuple):
    """Pairs of phases: the medians of the two sides in seconds, and their ratio pair by pair."""

    plain: float
    dear: float
    ratio: float
    lowest: float
    highest: float


def compared(pairs: Sequence[tuple[float, float]]) -> Compared:
    """Pairs of (beside plain callers, beside dear ones)."""
    plain, dear = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = sorted(hard / calm for calm, hard in pairs)
    return Compared(plain, dear, statistics.median(ratios), ratios[0], ratios[-1])


def pairs_of(
    measured: Callable[[Body], float], plain: Body, dear: Body, rounds: int
) -> list[tuple[float, float]]:
    """Phases in the order plain, dear, dear, plain, plain, dear, ..."""
    pairs = []
    for number in range(rounds):
        first, second = (plain, dear) if number % 2 == 0 else (dear, plain)
        pair = measured(first), measured(second)
        pairs.append(pair if number % 2 == 0 else pair[::-1])
    return pairs


def beside(server: Served, case: Dear, body: Body, expected: list[int]) -> float:
    callers = Callers(server, case, body)
    try:
        callers.wait()
        return p99(gaps(server, expected, case))
    finally:
        callers.end()


def main(
    engine_dir: Path,
    rounds: Annotated[int, typer.Option(help="pairs of phases for each field; their median counts")] = 5,
    field: Annotated[list[str] | None, typer.Option(help="only these")] = None,
) -> None:
    """Exit status 1 if a field costs ordinary streams more than twice the time, or a token differs."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with LLM(engine_dir, num_drafts=0, drafts="none") as llm:
        vocab_size, expected = llm.manifest.vocab_size, llm.generate([PROMPT], ORDINARY)[0].token_ids
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    server = Served(f"--engine-dir={engine_dir}", *ports, "--drafts=none")
    print(f"load averages {os.getloadavg()}, {os.cpu_count()} cores")
    print("| field | p99 beside plain callers, ms | beside dear ones, ms | ratio | lowest to highest pair |")
    print("|---|---|---|---|---|")
    worst = 0.0
    try:
        for name, case in dearest(vocab_size).items():
            if field and name not in field:
                continue
            measured = partial(beside, server, case, expected=expected)
            made = compared(pairs_of(measured, case.plain, case.dear, rounds))
            worst = max(worst, made.ratio)
            print(
                f"| {name} | {1e3 * made.plain:.2f} | {1e3 * made.dear:.2f} | {made.ratio:.2f}"
                f" | {made.lowest:.2f} to {made.highest:.2f} |",
                flush=True,
            )
    finally:
        server.process.terminate()
        server.process.wait(60)
    if worst > MAX_RATIO:
        print(
            f"a field costs ordinary streams {worst:.2f} of their time, the limit is {MAX_RATIO}",
            file=sys.stderr,
        )
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
