"""Decode steps of models of real dimensions on a GPU (random weights), beside their floors and vLLM's steps.

    PYTHONPATH=. python benchmarks/gpu_models.py [--models 9b,0.8b,nano,30b] [--rows 1,64,256]
        [--drafts none,mtp] [--context 2048] [--seconds 500]

Of each model it makes an engine in a temporary folder. A line per kind of drafts and number of rows: the
milliseconds of a step while all rows decode, over the floor (bytes that a step must move at 4.3 TB/s,
DESIGN.md 10) and beside vLLM 0.26's step on an H200; whether the tokens of two rows are their plain run's.
Random heads guess nothing, so drafts are verified and rejected; tokens/s with drafts are those of 3.05 tokens
a step, the acceptance (.85, .68, .52) that vLLM's numbers were taken with.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.runtime.api import Piece, SamplingParams
from hemiola.runtime.arch import arch_here
from hemiola.runtime.llm import LLM

CONFIGS = Path(__file__).parent / "configs"
NAMES = {
    "9b": "qwen3.5-9b",
    "0.8b": "qwen3.5-0.8b",
    "nano": "nemotron-nano-9b-v2",
    "30b": "nemotron-3.5-30b-a3b",
}
NUM_DRAFTS, TOKENS_A_STEP = 3, 3.05
# milliseconds at 2k tokens of context: (floor, vLLM 0.26 on an H200 on 2026-11-20)
KNOWN = {
    ("9b", "none"): {1: (3.73, 5.37), 8: (4.01, 5.92), 64: (6.22, 8.40), 256: (15.27, 20.0)},
    ("9b", "mtp"): {1: (5.50, 8.20), 8: (5.82, 9.20), 64: (9.86, 18.1), 256: (34.8, 60.2)},
    ("0.8b", "none"): {1: (0.365, 1.59), 8: (0.47, 2.1), 64: (1.31, 2.97), 256: (4.31, 6.8)},
    ("0.8b", "mtp"): {1: (0.75, 5.05), 8: (0.88, 5.6), 64: (2.04, 6.96), 256: (7.16, 17.4)},
    ("nano", "none"): {1: (3.94, 5.36), 8: (4.46, 6.27), 64: (8.63, 12.2), 256: (24.5, 35.7)},
}


class Decoding(NamedTuple):
    """What was measured while all rows decoded."""

    step_ms: float
    num_steps: int
    token_ids: list[list[int]]


def decode(llm: LLM, prompts: list[list[int]], num_steps: int) -> Decoding:
    """From the moment when the last request has its first token to the end of the first one."""
    chunks = sum(map(len, prompts)) // llm.config.max_step_tokens + len(prompts)
    params = SamplingParams(max_tokens=chunks + num_steps, temperature=0.0, ignore_eos=True)
    token_ids: list[list[int]] = [[] for _ in prompts]
    marks: list[tuple[float, int]] = []
    left, done = {*range(len(prompts))}, threading.Event()

    def note(row: int, piece: Piece) -> None:
        first = not token_ids[row]
        token_ids[row] += piece.token_ids
        if piece.finish_reason is not None:
            left.discard(row)
        if (first and all(token_ids)) or (piece.finish_reason is not None and len(marks) == 1):
            marks.append((time.perf_counter(), llm.counters.num_steps))
        if not left:
            done.set()

    for row, prompt in enumerate(prompts):
        llm.submit(prompt, params, lambda piece, row=row: note(row, piece))
    done.wait()
    (start, before), (end, after) = marks[:2]
    return Decoding(1e3 * (end - start) / max(after - before, 1), after - before, token_ids)


def lines(
    model: str, engine_dir: Path, rows: list[int], kinds: list[str], context: int, until: float
) -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 100_000, (max(rows), context)).tolist()
    plain: list[list[int]] = []
    for drafts in kinds:
        start = time.perf_counter()
        options = {} if drafts == "none" else {"num_drafts": NUM_DRAFTS, "adaptive_drafts": False}
        with LLM(engine_dir, drafts=drafts, prefix_cache=False, **options) as llm:
            print(f"{model}, drafts {drafts}: ready after {time.perf_counter() - start:.1f} s", flush=True)
            for num in rows:
                if time.perf_counter() > until:
                    print("  out of time")
                    return
                if not plain:
                    plain = [decode(llm, [prompt], 40).token_ids[0] for prompt in prompts[:2]]
                decode(llm, prompts[:num], 8)  # compiles and captures what is not there yet
                found = decode(llm, prompts[:num], 40)
                same = all(a[:40] == b[:40] for a, b in zip(found.token_ids, plain, strict=False))
                floor, theirs = KNOWN.get((model, drafts), {}).get(num, (float("nan"),) * 2)
                speed = num * (1 if drafts == "none" else TOKENS_A_STEP) / found.step_ms * 1e3
                print(
                    f"| {model} | {drafts} | {num} | {found.step_ms:.2f} | {found.step_ms / floor:.2f} |"
                    f" {theirs:.2f} | {theirs / found.step_ms:.2f} | {speed:,.0f} | {found.num_steps} |"
                    f" {'equal' if same else 'OTHER TOKENS'} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="9b")
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--drafts", default="none,mtp")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=500, help="begin no line after these")
    asked = parser.parse_args()
    until = time.perf_counter() + asked.seconds
    rows = [int(num) for num in asked.rows.split(",")]
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    print(f"{gpu}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {asked.context} tokens of context")
    print(
        "| model | drafts | rows | ms per step | over floor | vLLM's ms | of ours | tokens/s | steps | same |"
    )
    for model in asked.models.split(","):
        kinds = [kind for kind in asked.drafts.split(",") if kind == "none" or model != "nano"]
        with tempfile.TemporaryDirectory() as folder:
            limits = {"max_len": asked.context + 1024, "max_rows": max(rows), "max_step_tokens": 8192}
            options = Options(arch=arch_here(), random_weights=True, **limits)
            build(CONFIGS / NAMES[model], Path(folder, "engine"), options)
            lines(model, Path(folder, "engine"), rows, kinds, asked.context, until)


if __name__ == "__main__":
    main()
