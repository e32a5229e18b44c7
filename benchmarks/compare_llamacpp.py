"""Tokens per second against llama.cpp and transformers on checkpoints in bf16, all from the same ids.

PYTHONPATH=. python benchmarks/compare_llamacpp.py [--llama DIR] [--models qwen3.5-code,nemotron-h-code]
    [--weights fp32,bf16] [--counts 1,8] [--drafts none,mtp,ngram] [--threads 2] [--repeats 4]
    [--engines FOLDER] [--no-transformers]

512 -> 128 greedy tokens, prefix cache off, everyone in turn, best of the repeats. A model is a name in demo/
or a folder. `--weights` says what weights are rounded to: fp32 and bf16 are the checkpoint's numbers; int8
and int4 are ours of `build-engine --quantize` and llama.cpp's Q8_0 and Q4_0, which round the output head
(Q8_0 and Q6_K); int8+head and int4+head are ours with `--quantize-head int8`. DIR holds llama.cpp's library,
a program `same` (ids in, ids and seconds out) and `gguf/MODEL-{f32,bf16,q8_0,q4_0}.gguf`; without it
llama.cpp is left out. FOLDER keeps our engines for the next call. `kernels` and `outside`: wall milliseconds
of a decode step in compiled code and in all else. Answers are compared with those of the first row; int8 and
int4 are rounded by other rules than llama.cpp's, so their answers may differ.
"""

import argparse
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from generate_cpu import NEW_LEN, PROMPT_LEN, prompts, transformers_generate

from hemiola.builder.build import Options, build
from hemiola.plugins.cpu import kernel, steps
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.llm import LLM

ROOT = Path(__file__).parent.parent
INT8_HEAD = {"quantize_head": "int8"}
WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {  # llama.cpp's name, options of build-engine
    "fp32": ("f32", {}),
    "bf16": ("bf16", {}),
    "int8": ("q8_0", {"quantize": "int8"}),
    "int4": ("q4_0", {"quantize": "int4"}),
    "int8+head": ("q8_0", {"quantize": "int8"} | INT8_HEAD),
    "int4+head": ("q4_0", {"quantize": "int4"} | INT8_HEAD),
}
CACHE_BYTES = 2**29  # for 8 requests
Ids = list[list[int]]


class Timed(NamedTuple):
    wall: float
    first: float  # of them until every request had its first token
    cpu: float
    token_ids: Ids
    kernels: float = 0.0  # seconds of a decode step
    outside: float = 0.0


class Contestant(Protocol):
    name: str

    def run(self, ids: Ids) -> Timed: ...


class Llama:
    def __init__(self, folder: Path, model: str, dtype: str, threads: int) -> None:
        assert threads == 2, "`same` runs with two threads"
        self.name, self._folder, self._model = f"llama.cpp {dtype}", folder, f"{model}-{dtype}.gguf"

    def run(self, ids: Ids) -> Timed:
        with tempfile.TemporaryDirectory() as work:
            given, answer = Path(work) / "ids", Path(work) / "answer"
            given.write_text("".join(" ".join(map(str, line)) + "\n" for line in ids))
            fixed = ("2", str(PROMPT_LEN), "f16", "0")  # the first run reads the file
            command = [
                self._folder / "same",
                self._folder / "gguf" / self._model,
                given,
                str(len(ids)),
                *fixed,
            ]
            said = subprocess.run([*command, answer], capture_output=True, text=True, check=True).stdout
            found = [list(map(int, line.split())) for line in answer.read_text().splitlines()]
        numbers = {word: float(number) for word, number in re.findall(r"(wall|cpu|pp)\s+([\d.]+)", said)}
        wall, cpu, prompt = numbers["wall"], numbers["cpu"], numbers["pp"]
        return Timed(wall, len(ids) * PROMPT_LEN / prompt, cpu, found)


class Transformers:
    name = "transformers fp32"

    def __init__(self, checkpoint: Path) -> None:
        self._generate: Callable[[Ids], Ids] = transformers_generate(checkpoint)

    def run(self, ids: Ids) -> Timed:
        wall, cpu = time.perf_counter(), time.process_time()
        found = self._generate(ids)
        return Timed(time.perf_counter() - wall, 0.0, time.process_time() - cpu, found)


class Ours:
    def __init__(self, engine_dir: Path, dtype: str, drafts: str, clock: "Clock") -> None:
        self.name, self._clock = f"hemiola {dtype} {drafts}", clock
        num_drafts = 12 if drafts == "ngram" else "auto"
        options: dict[str, Any] = {"drafts": drafts, "num_drafts": num_drafts, "prefix_cache": False}
        sizes: dict[str, Any] = {"max_rows": 8, "max_len": 2 * PROMPT_LEN, "cache_bytes": CACHE_BYTES}
        self._llm = LLM(engine_dir, **sizes, **options)

    def run(self, ids: Ids) -> Timed:
        begun, whole = self._measured(ids, 1), self._measured(ids, NEW_LEN)
        inside, stepping, num_steps = (whole[key] - begun[key] for key in ("inside", "stepping", "num_steps"))
        split = (inside / num_steps, (stepping - inside) / num_steps)
        return Timed(whole["wall"], begun["wall"], whole["cpu"], self._answer, *split)

    def _measured(self, ids: Ids, num_tokens: int) -> dict[str, float]:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        counters, inside = self._llm.counters, self._clock.seconds
        stepping, num_steps = counters.step_seconds, counters.num_steps
        wall, cpu = time.perf_counter(), time.process_time()
        self._answer = [list(out.token_ids) for out in self._llm.generate(ids, params)]
        return {
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "inside": self._clock.seconds - inside,
            "stepping": counters.step_seconds - stepping,
            "num_steps": counters.num_steps - num_steps,
        }


class Clock:
    """Seconds in compiled code, of whoever calls it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for module, name in ((steps, "_replay"), (kernel, "_run")):
            entry: Any = getattr(module, name)
            setattr(module, name, SimpleNamespace(ctypes=self._timed(entry.ctypes)))

    def _timed(self, function: Any) -> Any:
        def call(*values: int) -> None:
            start = time.perf_counter()
            function(*values)
            self.seconds += time.perf_counter() - start

        return call


def in_fp32(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with every number widened."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(exist_ok=True)
    for path in checkpoint.iterdir():
        if path.suffix == ".safetensors":
            save_file({name: tensor.float() for name, tensor in load_file(path).items()}, folder / path.name)
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def engine_of(checkpoint: Path, dtype: str, drafts: bool, folder: Path) -> Path:
    """An engine of the checkpoint in `folder`, built unless it is there."""
    engine_dir = folder / f"{checkpoint.name}-{dtype}-engine"
    if not engine_dir.exists():
        source = in_fp32(checkpoint, folder / f"{checkpoint.name}-fp32") if dtype == "fp32" else checkpoint
        options: dict[str, Any] = {"num_drafts": 12} if drafts else {"drafts": "none"}
        build(source, engine_dir, Options(**WEIGHTS[dtype][1], **options))
    return engine_dir


def contestants(args: argparse.Namespace, checkpoint: Path, folder: Path, clock: Clock) -> list[Contestant]:
    found: list[Contestant] = []
    if args.llama is not None:
        types = dict.fromkeys(WEIGHTS[dtype][0] for dtype in args.weights)
        found += [Llama(args.llama, checkpoint.name, dtype, args.threads) for dtype in types]
    if not args.no_transformers:
        found.append(Transformers(checkpoint))
    for dtype in args.weights:
        engine_dir = engine_of(checkpoint, dtype, args.drafts != "none", folder)
        found += [Ours(engine_dir, dtype, drafts, clock) for drafts in args.drafts.split(",")]
    return found


def compare(args: argparse.Namespace, model: str, folder: Path, clock: Clock) -> None:
    checkpoint = Path(model) if "/" in model else ROOT / "demo" / model
    everyone = contestants(args, checkpoint, folder, clock)
    for count in map(int, args.counts.split(",")):
        ids = prompts(checkpoint, count)
        best: dict[str, Timed] = {}
        for repeat in range(1 + args.repeats):  # the first compiles and warms
            for one in everyone:
                found, known = one.run(ids), best.get(one.name)
                if repeat == 0 or known is None or found.wall < known.wall:
                    best[one.name] = found
        print(f"\n{checkpoint.name}, {count} of {PROMPT_LEN} -> {NEW_LEN} tokens, {args.threads} threads\n")
        print(
            "| who | tokens/s | prompt tokens/s | decode tokens/s | CPU s | kernels ms | outside ms | same |"
        )
        print("|---|---|---|---|---|---|---|---|", flush=True)
        expected = next(iter(best.values())).token_ids
        for name, timed in best.items():
            same = sum(a == b for a, b in zip(timed.token_ids, expected, strict=True))
            prompt = f"{count * PROMPT_LEN / timed.first:.0f}" if timed.first else ""
            decode = f"{count * (NEW_LEN - 1) / (timed.wall - timed.first):.0f}" if timed.first else ""
            split = [f"{1e3 * part:.3f}" if part else "" for part in (timed.kernels, timed.outside)]
            cells = (name, f"{count * NEW_LEN / timed.wall:.0f}", prompt, decode, f"{timed.cpu:.2f}", *split)
            print("|", " | ".join((*cells, f"{same} of {count}")), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--llama", type=Path, help="the folder of llama.cpp")
    parser.add_argument("--models", default="qwen3.5-code,nemotron-h-code")
    parser.add_argument("--weights", default="fp32,bf16", help=f"some of {','.join(WEIGHTS)}")
    parser.add_argument("--counts", default="1,8", help="requests at a time")
    parser.add_argument("--drafts", default="none,mtp,ngram")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--engines", type=Path, help="keep engines in this folder, and take those there")
    parser.add_argument("--no-transformers", action="store_true")
    args = parser.parse_args()
    args.weights = args.weights.split(",")
    if unknown := set(args.weights) - WEIGHTS.keys():
        parser.error(f"--weights: {', '.join(sorted(unknown))} is none of {', '.join(WEIGHTS)}")
    torch.set_num_threads(args.threads)
    clock = Clock()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.engines or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for model in args.models.split(","):
            compare(args, model, folder, clock)


if __name__ == "__main__":
    main()
