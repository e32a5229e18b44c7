"""Decode steps of models of real dimensions on a GPU (random weights), beside their floors and vLLM's steps.

    PYTHONPATH=. python benchmarks/gpu_models.py [--models 9b,9b/32k,9b/int4/draft-int4,0.8b]
        [--rows 1,64,256] [--drafts none,mtp,adaptive] [--context 2048] [--prompts] [--engines FOLDER]
        [--build]

Of each model it makes an engine, in --engines if that is named and has none yet; with --build it does no
more, and needs no GPU. A line per kind of drafts and number of rows: the
milliseconds of a step while all rows decode, over the floor (bytes that a step must move at 4.3 TB/s,
DESIGN.md 10) and beside vLLM 0.26's step on an H200; how much of the time the GPU had no step to do; whether
the tokens of two rows are their plain run's, and a checksum of all rows' tokens. Random heads guess nothing,
so drafts are verified and rejected; tokens/s with mtp are those of 3.05 tokens a step, the acceptance (.85,
.68, .52) that vLLM's numbers were taken with. adaptive: as many drafts as pay, none here; then one token a
step, to be held against none. It has two lines, and so has none beside it: steps 0-48, in which a fresh
engine (one for each number of rows) finds out, and 200-300, what it costs from then on. The column "steps"
says which were counted.

--prompts: seconds of 8,192 tokens against 790 TFLOP/s, and to the first token of 10,100: cold, the same
prompt again, and behind a prefix of 10,000 tokens that another request had; a hit's token is the cold run's.
"""

import argparse
import math
import re
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.arch import arch_here
from hemiola.runtime.llm import LLM
from hemiola.runtime.manifest import Manifest

CONFIGS = Path(__file__).parent / "configs"
NAMES = {
    "9b": "qwen3.5-9b",
    "0.8b": "qwen3.5-0.8b",
    "nano": "nemotron-nano-9b-v2",
    "30b": "nemotron-3.5-30b-a3b",
    "35b": "qwen3.5-35b-a3b",
}
PARTS: dict[str, dict[str, Any]] = {  # behind a model's name, each behind a slash: options of its engine
    "fp8": {"quantize": "fp8"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "nvfp4": {"quantize": "nvfp4"},
    "w8a8": {"quantize": "fp8", "act_dtype": "fp8"},
    "draft-int4": {"draft_head": "int4"},
    "head-int4": {"quantize_head": "int4"},
    "head-fp8": {"quantize_head": "fp8"},
    "32k": {"draft_vocab": 32_768},  # drafts are chosen among the lowest ids
}
ADAPTIVE = "adaptive"
NUM_DRAFTS, TOKENS_A_STEP = 3, 3.05
FIRST_STEPS = (0, 40)
PHASES = ((0, 48), (200, 300))  # adaptive: it learns; it knows
# milliseconds at 2k tokens of context: (floor, vLLM 0.26 on an H200 on 2026-11-20)
KNOWN = {
    ("9b", "none"): {1: (3.73, 5.37), 8: (4.01, 5.92), 64: (6.22, 8.40), 256: (15.27, 20.0)},
    ("9b", "mtp"): {1: (5.50, 8.20), 8: (5.82, 9.20), 64: (9.86, 18.1), 256: (34.8, 60.2)},
    ("0.8b", "none"): {1: (0.365, 1.59), 8: (0.47, 2.1), 64: (1.31, 2.97), 256: (4.31, 6.8)},
    ("0.8b", "mtp"): {1: (0.75, 5.05), 8: (0.88, 5.6), 64: (2.04, 6.96), 256: (7.16, 17.4)},
    ("nano", "none"): {1: (3.94, 5.36), 8: (4.46, 6.27), 64: (8.63, 12.2), 256: (24.5, 35.7)},
    ("30b", "none"): {1: (1.53, math.nan), 8: (5.42, math.nan), 64: (15.54, math.nan)},
    ("30b", "mtp"): {1: (3.93, math.nan), 8: (12.95, math.nan), 64: (18.57, math.nan)},
}
PROMPT_LEN, SHARED_LEN, TAIL_LEN, PROMPT_ROWS = 8192, 10_000, 100, 8
VLLMS_MS = {"9b": (213, 261, 32.3, 66.5)}  # of the four lines about prompts
THEIRS = "vLLM's ms"
BANDWIDTH = 4.3e12  # bytes a second
PEAK = 790e12  # operations a second, bf16


class Decoding(NamedTuple):
    """What was measured in some of the steps in which all rows decode."""

    step_ms: float
    idle: float  # share of the time
    steps: tuple[int, int]
    token_ids: list[list[int]]


class Mark(NamedTuple):
    """A moment between two steps."""

    seconds: float
    step: int
    busy: float  # seconds of the device


def decode(llm: LLM, prompts: list[list[int]], *windows: tuple[int, int]) -> list[Decoding]:
    """Of windows of steps; step 0 is the first when the last request has its first token."""
    edges = sorted({0, *(step for window in windows for step in window)})
    chunks = sum(map(len, prompts)) // llm.config.max_step_tokens + len(prompts)
    token_ids: list[list[int]] = [[] for _ in prompts]
    marks: list[Mark] = []

    def note(row: int, piece: Piece, num_left: int) -> None:
        token_ids[row] += piece.token_ids
        if all(token_ids) and len(marks) < len(edges):
            counters = llm.counters
            now = Mark(time.perf_counter(), counters.num_steps, counters.device_seconds)
            step = now.step - marks[0].step if marks else 0
            while len(marks) < len(edges) and (step >= edges[len(marks)] or num_left < len(prompts)):
                marks.append(now)

    _submit(llm, prompts, chunks + edges[-1], note).wait()
    at = dict(zip(edges, marks, strict=True))
    return [_between(at[start], at[end], marks[0].step, token_ids) for start, end in windows]


def begun(llm: LLM, prompts: list[list[int]], num_tokens: int) -> threading.Event:
    """Returns when all rows have their first tokens; the event says that all have so many."""
    started, waiting = threading.Event(), {*range(len(prompts))}

    def note(row: int, piece: Piece, num_left: int) -> None:
        waiting.discard(row)
        if not waiting:
            started.set()

    done = _submit(llm, prompts, num_tokens, note)
    started.wait()
    return done


def _submit(
    llm: LLM, prompts: list[list[int]], num_tokens: int, note: Callable[[int, Piece, int], None]
) -> threading.Event:
    """The event says that all rows have so many tokens. note: a row, its piece, how many rows go on."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    left, done = {*range(len(prompts))}, threading.Event()

    def take(row: int, piece: Piece) -> None:
        if piece.finish_reason is not None:
            left.discard(row)
        note(row, piece, len(left))
        if not left:
            done.set()

    for row, prompt in enumerate(prompts):
        llm.submit(prompt, params, partial(take, row))
    return done


def _between(start: Mark, end: Mark, first: int, token_ids: list[list[int]]) -> Decoding:
    seconds, num_steps = end.seconds - start.seconds, end.step - start.step
    idle = 1 - (end.busy - start.busy) / seconds if seconds else math.nan
    return Decoding(
        1e3 * seconds / max(num_steps, 1), idle, (start.step - first, end.step - first), token_ids
    )


def lines(model: str, engine_dir: Path, rows: list[int], kinds: list[str], context: int) -> None:
    """A line per kind of drafts, number of rows and window of steps."""
    prompts = np.random.default_rng(0).integers(0, 100_000, (max(rows), context)).tolist()
    windows = PHASES if ADAPTIVE in kinds else (FIRST_STEPS,)
    plain: list[list[int]] = []
    for drafts in kinds:
        for several in [[num] for num in rows] if drafts == ADAPTIVE else [rows]:
            with opened(model, engine_dir, drafts) as llm:
                if not plain:
                    plain = [decode(llm, [prompt], windows[-1])[0].token_ids[0] for prompt in prompts[:2]]
                for num in several:
                    if drafts != ADAPTIVE:
                        # what is not there yet is loaded; graphs are, and many prompts take long
                        decode(llm, prompts[: num if num <= 64 else 8], (0, 8))
                    for found in decode(llm, prompts[:num], *windows):
                        print_line(model, drafts, num, found, plain, saved_ms_of(llm.manifest, drafts))


def opened(model: str, engine_dir: Path, drafts: str) -> LLM:
    """With this kind of drafts."""
    start = time.perf_counter()
    options = {} if drafts == "none" else {"num_drafts": NUM_DRAFTS, "adaptive_drafts": drafts == ADAPTIVE}
    head = "mtp" if drafts == ADAPTIVE else drafts
    llm = LLM(engine_dir, drafts=head, prefix_cache=False, **options)
    print(f"* {model}, drafts {drafts}: ready after {time.perf_counter() - start:.1f} s", flush=True)
    return llm


def saved_ms_of(found: Manifest, drafts: str) -> float:
    """Of the floor, by weights that are quantised."""
    drawn = (d for name, d in found.drawn.items() if d.layout and (drafts != "none" or "mtp" not in name))
    return 1e3 * sum(2 * math.prod(d.shape) - d.nbytes for d in drawn) / BANDWIDTH


def print_line(
    model: str, drafts: str, num: int, found: Decoding, plain: list[list[int]], saved_ms: float
) -> None:
    """Of the table; `plain`: tokens of the first rows' plain runs."""
    same = all(
        found_ids[:num_ids] == ids[:num_ids]
        for found_ids, ids in zip(found.token_ids, plain, strict=False)
        for num_ids in [min(len(found_ids), len(ids))]
    )
    floor, theirs = KNOWN.get((model.partition("/")[0], drafts), {}).get(num, (float("nan"),) * 2)
    floor -= saved_ms
    speed = num * (TOKENS_A_STEP if drafts == "mtp" else 1) / found.step_ms * 1e3
    print(
        f"| {model} | {drafts} | {num} | {found.step_ms:.2f} | {found.step_ms / floor:.2f} |"
        f" {theirs:.2f} | {theirs / found.step_ms:.2f} | {speed:,.0f} | {found.steps[0]}-{found.steps[1]} |"
        f" {found.idle:.1%} | {checksum(found.token_ids)} | {'equal' if same else 'OTHER TOKENS'} |",
        flush=True,
    )


def checksum(token_ids: list[list[int]]) -> str:
    """The same with the same tokens of all rows, whatever the drafts. Random weights differ with --tp."""
    return f"{zlib.crc32(repr(token_ids).encode()):08x}"


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int, int]:
    """Milliseconds until it comes, the token, and how much of the prompt was a hit."""
    start = time.perf_counter()
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    return 1e3 * (time.perf_counter() - start), output.token_ids[0], output.metrics.cached_tokens


def prompt_lines(model: str, engine_dir: Path) -> None:
    """What prompts cost."""
    rng = np.random.default_rng(1)
    with LLM(engine_dir, drafts="none", num_snapshots=64) as llm:
        weights = sum(math.prod(drawn.shape) for name, drawn in llm.manifest.drawn.items() if is_dense(name))

        def fresh(length: int) -> list[int]:
            return rng.integers(0, 100_000, length).tolist()

        for _ in range(2):  # everything is loaded then
            first_token(llm, fresh(SHARED_LEN))
        eight = statistics.median(first_token(llm, fresh(PROMPT_LEN))[0] for _ in range(3))
        times: list[tuple[float, float, float]] = []
        is_same = True
        for _ in range(3):
            prompt = fresh(SHARED_LEN + TAIL_LEN)
            cold, token, _ = first_token(llm, prompt)
            again, same_token, num_again = first_token(llm, prompt)
            start = fresh(SHARED_LEN)
            first_token(llm, start)
            behind = start + fresh(TAIL_LEN)
            shared, shared_token, num_shared = first_token(llm, behind)
            llm.reset_prefix_cache()
            is_same &= token == same_token and shared_token == first_token(llm, behind)[1]
            is_same &= num_shared > 0 and num_again > 0
            times.append((cold, again, shared))
    cold, again, shared = (statistics.median(part) for part in zip(*times, strict=True))
    floor = 2 * weights * PROMPT_LEN / PEAK * 1e3
    theirs = VLLMS_MS.get(model, (float("nan"),) * 4)
    length = SHARED_LEN + TAIL_LEN
    names = (
        f"{PROMPT_LEN} tokens",
        f"{length} tokens, cold",
        f"again ({num_again} cached)",
        f"behind a prefix ({num_shared} cached)",
    )
    for name, milliseconds, known in zip(names, (eight, cold, again, shared), theirs, strict=True):
        share = f"{floor / milliseconds:.0%} of {PEAK / 1e12:.0f} TFLOP/s" if milliseconds is eight else ""
        print(
            f"| {model} | {name} | {milliseconds:.1f} | {share} | {known} | {known / milliseconds:.2f} |"
            f" {'equal' if is_same else 'OTHER TOKENS'} |",
            flush=True,
        )


def is_dense(name: str) -> bool:
    """A weight that every token of a prompt is multiplied with."""
    return not re.search(r"embed|head|^mtp|draft", name)


def made(model: str, folder: Path, max_rows: int, max_len: int, tp: int = 1, same_bits: bool = False) -> Path:
    """The engine of a model in a folder."""
    bits = "-same-bits" if same_bits else ""
    engine_dir = folder / f"{model.replace('/', '-')}-{max_rows}-{max_len}-{tp}{bits}"
    if not (engine_dir / "manifest.json").is_file():
        arch = arch_here() if torch.cuda.is_available() else "sm_90"
        sizes = {"max_len": max_len, "max_rows": max_rows, "max_step_tokens": 8192}
        name, *parts = model.split("/")
        chosen = {option: value for part in parts for option, value in PARTS[part].items()}
        options = Options(arch=arch, random_weights=True, tp=tp, same_bits=same_bits, **chosen, **sizes)
        build(CONFIGS / NAMES[name], engine_dir, options)
    return engine_dir


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="9b")
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--drafts", default="none,mtp")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompts", action="store_true", help="what prompts cost, too")
    parser.add_argument("--engines", type=Path, help="where engines are kept; default: a temporary folder")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of an engine")
    parser.add_argument("--same-bits", action="store_true", help="build with --same-bits")
    parser.add_argument("--build", action="store_true", help="build the engines, and no more")
    asked = parser.parse_args()
    if not (asked.build or torch.cuda.is_available()):
        sys.exit("gpu_models.py: torch finds no CUDA device here; --build needs none")
    with tempfile.TemporaryDirectory() as folder:
        run(asked, asked.engines or Path(folder))


def run(asked: argparse.Namespace, folder: Path) -> None:
    """All lines, or only engines."""
    rows = [int(num) for num in asked.rows.split(",") if num]
    models = asked.models.split(",")
    if asked.build:
        for model in models:
            made(model, folder, max(rows), asked.context + 1024, asked.tp, asked.same_bits)
        return
    gpu = torch.cuda.get_device_name(0)
    print(f"{gpu}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {asked.context} tokens of context")
    if rows:
        print(
            f"| model | drafts | rows | ms | over floor | {THEIRS} | of ours | tokens/s | steps | idle",
            end="",
        )
        print(" | checksum | tokens |")
        print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for model in models if rows else ():
        kinds = [kind for kind in asked.drafts.split(",") if kind == "none" or model != "nano"]
        engine_dir = made(model, folder, max(rows), asked.context + 1024, asked.tp, asked.same_bits)
        lines(model, engine_dir, rows, kinds, asked.context)
    if asked.prompts:
        print(f"| model | prompt | ms to the first token | | {THEIRS} | of ours | same |")
        print("|---|---|---|---|---|---|---|")
    for model in models if asked.prompts else ():
        sizes = PROMPT_ROWS, SHARED_LEN + 1024
        prompt_lines(model, made(model, folder, *sizes, asked.tp, asked.same_bits))


if __name__ == "__main__":
    main()
