"""Two checkouts of Hemiola in turn, each in a process of its own with engines that it builds itself.

    python benchmarks/two_trees.py OLD NEW --what cpu [--seconds 300]
    python benchmarks/two_trees.py OLD NEW --what decode [--seconds 300]        (OMP_NUM_THREADS=1)
    python benchmarks/two_trees.py OLD NEW --what scheduler
    python benchmarks/two_trees.py OLD NEW --what prompts [--models 0.8b]        (a GPU)
    python benchmarks/two_trees.py OLD NEW --what models [--models 9b,0.8b]      (a GPU)

cpu: prompts of 512 tokens and decode steps of the bundled checkpoints. decode: their steps behind prompts of
32 tokens, and what compiled code takes of them. scheduler: `scheduler.py`. prompts: the first token, the
host's launch and the device's time. models: decode steps behind 1,024 tokens of context.
A line has the medians of both, the median of the pairs' ratios, and whether all tokens are equal.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

PROMPT_LEN, SHORT_LEN, NEW_LEN = 512, 32, 128
ON_CPU = ("cpu", "decode")
CPU_MODELS = ("qwen3.5-code", "nemotron-h-code")
RULES = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 1}}
LENGTHS = (60, 200, 512, 1000, 2048)
CONTEXT, WINDOWS = 1024, [(0, 40), (40, 80), (80, 120)]
GPU_ROWS = 64


class Timed(NamedTuple):
    """By name, several values of the same thing; and tokens."""

    values: dict[str, list[float]]
    token_ids: list[list[int]]


class Work:
    """What a checkout's process is asked."""

    def __init__(self, tree: Path, folder: Path) -> None:
        sys.path.insert(0, str(tree / "benchmarks"))
        self._tree, self._folder = tree, folder
        self._llm: Any = None
        self._hosts: list[float] = []
        self._clock: Any = None  # of compiled code

    def open(self, model: str, drafts: str) -> float:
        """Build and open an engine; seconds."""
        import torch

        from hemiola.builder.build import Options, build
        from hemiola.runtime.llm import LLM

        start = time.perf_counter()
        if torch.cuda.is_available():
            import gpu_models

            engine = gpu_models.made(model, self._folder, GPU_ROWS, 3072)
            options = {} if drafts == "none" else {"num_drafts": 3, "adaptive_drafts": False}
        else:
            engine, options = self._folder / model, {}
            if not (engine / "manifest.json").is_file():
                build(self._tree / "demo" / model, engine, Options(num_drafts=12))
        self._llm = LLM(engine, drafts=drafts, prefix_cache=False, **options)
        if (steps := getattr(self._llm._loop, "steps", None)) is not None:
            steps.launch = self._timed(steps.launch)
        return time.perf_counter() - start

    def close(self) -> None:
        self._llm.close()

    def _timed(self, launch: Callable) -> Callable:
        def timed(plan: object) -> object:
            start = time.perf_counter()
            launched = launch(plan)
            self._hosts.append(time.perf_counter() - start)
            return launched

        return timed

    def cpu(self, count: int) -> Timed:
        """Requests at once."""
        prompts = self._texts(count, PROMPT_LEN)
        (first, first_cpu, _), (whole, cpu, token_ids) = (self._run(prompts, num) for num in (1, NEW_LEN))
        rest = NEW_LEN - 1
        decode, decode_cpu = (whole - first) / rest, (cpu - first_cpu) / rest
        return Timed({"prompts": [first], "a token": [decode], "a token, CPU": [decode_cpu]}, token_ids)

    def decode(self, count: int) -> Timed:
        """Requests at once."""
        from compare_llamacpp import Clock

        self._clock = self._clock or Clock()
        prompts, token_ids = self._texts(count, SHORT_LEN), []
        runs = []
        for num in (1, NEW_LEN):
            before = self._spent()
            wall, _, token_ids = self._run(prompts, num)
            runs.append((wall, *(b - a for a, b in zip(before, self._spent(), strict=True))))
        wall, stepping, compiled, steps = (b - a for a, b in zip(*runs, strict=True))
        parts = {"a step": wall, "compiled code": compiled, "outside": stepping - compiled}
        return Timed({name: [part / steps] for name, part in parts.items()}, token_ids)

    def _spent(self) -> tuple[float, float, int]:
        """Milliseconds of steps, and of compiled code; steps."""
        counters = self._llm.counters
        return 1e3 * counters.step_seconds, 1e3 * self._clock.seconds, counters.num_steps

    def _texts(self, count: int, length: int) -> list[list[int]]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._tree / "demo" / CPU_MODELS[0] / "tokenizer.json"))
        names = ("argparse", "ast", "bdb", "calendar", "cmd", "codecs", "configparser", "csv")
        texts = [(Path(argparse.__file__).parent / f"{name}.py").read_text() for name in names[:count]]
        return [tokenizer.encode(text).ids[:length] for text in texts]

    def _run(self, prompts: list[list[int]], num_tokens: int, **rule: Any) -> tuple[float, float, list]:
        from hemiola.runtime.api import SamplingParams

        given: dict[str, Any] = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True} | rule
        params = SamplingParams(**given)
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = self._llm.generate(prompts, params)
        wall, cpu = 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)
        return wall, cpu, [list(output.token_ids) for output in outputs]

    def scheduler(self, rows: int) -> Timed:
        import scheduler

        from hemiola.runtime.text import Text

        own, outside = scheduler.measure(rows, Text(self._tree / "demo" / CPU_MODELS[0]))
        return Timed({"plan + commit + reap, us": [own], "outside the engine, us": [outside]}, [])

    def prompts(self, rule: str, length: int) -> Timed:
        import numpy as np

        values: dict[str, list[float]] = {"first token": [], "host": [], "device": []}
        token_ids = []
        for n in range(8):
            prompt = np.random.default_rng(length + n).integers(0, 100_000, length).tolist()
            self._hosts.clear()
            device = self._llm.counters.device_seconds
            wall, _, made = self._run([prompt], 1, **RULES[rule])
            values["first token"].append(wall)
            values["host"].append(1e3 * self._hosts[0])
            values["device"].append(1e3 * (self._llm.counters.device_seconds - device))
            token_ids += made
        return Timed({name: [statistics.median(part)] for name, part in values.items()}, token_ids)

    def models(self, rows: int) -> Timed:
        import gpu_models
        import numpy as np

        prompts = np.random.default_rng(0).integers(0, 100_000, (rows, CONTEXT)).tolist()
        found = gpu_models.decode(self._llm, prompts, *WINDOWS)
        token_ids = [ids[: WINDOWS[-1][1]] for ids in found[0].token_ids]
        return Timed({"a step": [one.step_ms for one in found]}, token_ids)


class Worker:
    """A checkout's process."""

    def __init__(self, tree: Path, folder: Path) -> None:
        environment = os.environ | {"PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, str(Path(__file__).resolve()), str(tree), str(folder), "--work"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, cwd=tree, **pipes)

    def ask(self, *call: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(call), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"a checkout's process ended at {call}")
        return json.loads(answer)


def work(tree: Path, folder: Path) -> None:
    """Calls on lines in, results on lines out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    own = Work(tree, folder)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(own, name)(*arguments)), file=answers, flush=True)
    os._exit(0)


def cases(what: str, models: list[str]) -> Iterator[tuple[tuple[str, str] | None, str, list[tuple], int]]:
    """The engine and its drafts, a name, calls, and pairs of each at least."""
    if what == "scheduler":
        yield None, "", [("scheduler", rows) for rows in (1, 8, 64, 256)], 10
    for drafts in ("none", "mtp", "ngram") if what in ON_CPU else ("none", "mtp"):
        for model in models if what != "scheduler" else ():
            calls: list[tuple] = [(what, num) for num in ((1, 8) if what in ON_CPU else (1, GPU_ROWS))]
            if what == "prompts":
                calls = [("prompts", rule, length) for rule in RULES for length in LENGTHS]
            if drafts != "mtp" or model not in ("nano", "nemotron-h-code"):
                yield (model, drafts), f"{model}, {drafts}", calls, 4 if what == "models" else 6


def at_once(workers: list[Worker], *call: object) -> None:
    with ThreadPoolExecutor(len(workers)) as pool:
        for done in [pool.submit(worker.ask, *call) for worker in workers]:
            done.result()


def compare(workers: list[Worker], call: tuple, least: int, seconds: float) -> None:
    """A line for each value."""
    until, number = time.monotonic() + seconds, 0
    runs: list[list[dict[str, list[float]]]] = [[], []]
    tokens: list[Any] = [None, None]
    while number <= least or time.monotonic() < until:
        for which in (0, 1) if number % 2 else (1, 0):
            values, tokens[which] = workers[which].ask(*call)
            if number:  # the first one warms up
                runs[which].append(values)
        number += 1
    for name in runs[0][0]:
        old, new = ([value for run in side for value in run[name]] for side in runs)
        ratio = statistics.median(b / a for a, b in zip(old, new, strict=True))
        same = "" if not tokens[0] else "equal" if tokens[0] == tokens[1] else "OTHER TOKENS"
        cells = (
            f"{statistics.median(old):.3f} | {statistics.median(new):.3f} | {ratio:.3f} | {len(old)} | {same}"
        )
        print(f"| {' '.join(map(str, call))} | {name} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--what", choices=(*ON_CPU, "scheduler", "prompts", "models"), default="cpu")
    parser.add_argument("--models", help="of gpu_models.py; default: 9b,0.8b, or the bundled ones on a CPU")
    parser.add_argument("--seconds", type=float, default=0.0, help="for each line, at least")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.old, asked.new)
    models: list[str] = list(CPU_MODELS) if asked.what in ON_CPU else ["9b", "0.8b"]
    models = asked.models.split(",") if asked.models else models
    with tempfile.TemporaryDirectory() as folder:
        places = (asked.old.resolve(), Path(folder) / "old"), (asked.new.resolve(), Path(folder) / "new")
        workers = [Worker(*place) for place in places]
        print("| what | ms | old | new | new / old | pairs | tokens |\n|---|---|---|---|---|---|---|")
        for engine, name, calls, least in cases(asked.what, models):
            if engine is not None:
                at_once(workers, "open", *engine)
                print(f"| {name} |||||||", flush=True)
            for call in calls:
                compare(workers, call, least, asked.seconds)
            if engine is not None:
                at_once(workers, "close")


if __name__ == "__main__":
    main()
