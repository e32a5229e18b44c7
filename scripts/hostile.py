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

MOST_RATIO = 2.0
PROMPT = "def read_lines(path):\n"
ORDINARY = SamplingParams(max_tokens=300, ignore_eos=True, num_drafts=0)
NUM_STREAMS = 2
NUM_CALLERS = 2
N = 8  # answers of each dear request
WORD_LEN = 4
Body = dict[str, Any]


def dearest(vocab_size: int) -> dict[str, Body]:
    """By field: what a request adds that is as dear as is served."""
    some = [(7 * i) % vocab_size for i in range(MAX_ENTRIES)]
    words = [[some[(i + j) % MAX_ENTRIES] for j in range(WORD_LEN)] for i in range(MAX_WORD_IDS // WORD_LEN)]
    stops = ["\n" + "x" * 30 + chr(33 + i) for i in range(MAX_CHARACTERS["stop"] // 32)]
    long_word = {"type": "string", "maxLength": 500}
    schema = {"type": "object", "properties": {f"p{i}": long_word for i in range(50)}}
    return {
        "bad_words_ids": {"bad_words_ids": json.dumps(words)},
        "logit_bias": {"logit_bias": json.dumps({str(i): -0.01 for i in dict.fromkeys(some)})},
        "stop": {"stop": stops},
        "stop_token_ids": {"stop_token_ids": sorted(set(some)), "min_tokens": ORDINARY.max_tokens},
        "repetition_penalty": {
            "repetition_penalty": 1.01,
            "frequency_penalty": 0.01,
            "presence_penalty": 0.01,
        },
        "logprobs": {"logprobs": 20},
        "top_p": {"temperature": 1.5, "top_p": 0.999, "min_p": 1e-9},
        "structured_outputs": {"structured_outputs": json.dumps({"json": schema})},
        "cache_salt": {"cache_salt": "s" * MAX_CHARACTERS["cache_salt"]},
    }


class Callers:
    """Post one body again and again until they are ended."""

    def __init__(self, server: Served, body: Body) -> None:
        self._url = f"{server.http_url}/v2/models/hemiola/generate"
        self._body = body
        self._over = threading.Event()
        self._ended = [0]
        self._threads = [threading.Thread(target=self._run) for _ in range(NUM_CALLERS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            answer = requests.post(self._url, json=self._body, timeout=RETRY_S)
            if answer.status_code != 200 and "OVERLOADED" not in answer.text:
                raise SystemExit(f"a dear request was refused: {answer.text[:300]}")
            self._ended[0] += 1

    def wait(self) -> None:
        """Until one answer is there: grammars are compiled, prompts are cached."""
        while not self._ended[0] and any(thread.is_alive() for thread in self._threads):
            time.sleep(0.05)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def gaps(server: Served, expected: list[int]) -> list[float]:
    """Seconds between tokens of the ordinary streams."""

    def one(_: int) -> list[float]:
        found, ids, last = [], [], 0.0
        with Client(server.grpc_url, retries=50) as client:
            for piece in client.stream(PROMPT, ORDINARY):
                now = time.perf_counter()
                if ids and piece.token_ids:
                    found += [(now - last) / len(piece.token_ids)] * len(piece.token_ids)
                ids, last = ids + piece.token_ids, now
        if ids != expected:
            raise SystemExit("an ordinary stream has other tokens than its plain run")
        return found

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
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
        found = measured(first), measured(second)
        pairs.append(found if number % 2 == 0 else found[::-1])
    return pairs


def beside(server: Served, body: Body, expected: list[int]) -> float:
    callers = Callers(server, body)
    try:
        callers.wait()
        return p99(gaps(server, expected))
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
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    server = Served(f"--engine-dir={engine_dir}", *ports, "--drafts=none")
    plain = {"text_input": PROMPT, "n": N, "max_tokens": ORDINARY.max_tokens, "ignore_eos": True}
    print(f"load averages {os.getloadavg()}, {os.cpu_count()} cores")
    print("| field | p99 beside plain callers, ms | beside dear ones, ms | ratio | lowest to highest pair |")
    print("|---|---|---|---|---|")
    worst = 0.0
    try:
        for name, dear in dearest(vocab_size).items():
            if field and name not in field:
                continue
            measured = partial(beside, server, expected=expected)
            made = compared(pairs_of(measured, plain, _with(plain, dear), rounds))
            worst = max(worst, made.ratio)
            print(
                f"| {name} | {1e3 * made.plain:.2f} | {1e3 * made.dear:.2f} | {made.ratio:.2f}"
                f" | {made.lowest:.2f} to {made.highest:.2f} |",
                flush=True,
            )
    finally:
        server.process.terminate()
        server.process.wait(60)
    if worst > MOST_RATIO:
        print(
            f"a field costs ordinary streams {worst:.2f} of their time, the limit is {MOST_RATIO}",
            file=sys.stderr,
        )
        raise SystemExit(1)


def _with(plain: Body, dear: Body) -> Body:
    """A grammar must be able to end."""
    body = plain | dear
    return {k: v for k, v in body.items() if not (k == "ignore_eos" and "structured_outputs" in dear)}


if __name__ == "__main__":
    typer.run(main)
