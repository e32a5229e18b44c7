"""Report 003's table: Qwen3.5-35B-A3B in FP8, two GPUs, MTP with 2 drafts, prefix cache, 16 requests at once.

    PYTHONPATH=. python3 benchmarks/gpu_report_003.py [--requests 96] [--tp 2] [--engines FOLDER] [--build]
        [--quantize fp8|none] [--at-once 16] [--prompt 4400] [--answer 512] [--profile]

Weights are random numbers of the real dimensions, so no head guesses what the trunk chooses. Drafts are
judged by a fixed pattern instead, at the report's rates (85.7 % of the first drafts, 71.0 % of the second):
where the pattern accepts a draft, the trunk is made to choose it. All that a step computes is computed; a
choice costs some small kernels more. The pattern is a hash of slot and position, the same on all ranks; it
stands in this script, and the engine knows nothing of it. Prompts are random ids, all different. When a
request ends, the next one is sent.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

MODEL = Path(__file__).parent / "configs" / "qwen3.5-35b-a3b"
RATES = (0.857, 0.710)  # of all drafts at this place
NUM_DRAFTS = len(RATES)
THEIRS = {"tokens/s": 2300, "TPOT, ms": 6.68, "TTFT, ms (median)": 84}
TOLD = 10.0  # seconds between two lines
GOALS = {"tokens/s": 3500, "TPOT, ms": 4.5, "TTFT, ms (median)": 70}


def judge_by_pattern() -> None:
    """In this process: steps of greedy rows accept drafts by the pattern."""
    from hemiola.plugins.step.plan import DRAFTS, TOTAL
    from hemiola.runtime.device.head import Best
    from hemiola.runtime.step.captured import Captured
    from hemiola.runtime.step.choice import Argmax
    from hemiola.runtime.step.eager import EagerSteps

    given_the_last = [rate / before for rate, before in zip(RATES, (1.0, *RATES), strict=False)]
    limits = torch.tensor([int(rate * 2**20) for rate in given_the_last])

    class ByPattern(Argmax):
        def __init__(self, ops: Any, ledger: Any, limits: torch.Tensor) -> None:
            super().__init__(ops)
            self._ledger, self._limits = ledger, limits

        def choose(self, scores: Any, batch: Any) -> Any:
            best = super().choose(scores, batch)
            if batch is None:  # a draft
                return best
            slot, position, lengths = batch.line_slot, batch.line_position, self._ledger.lengths
            place = position - lengths[TOTAL][slot]
            is_draft = (place >= 0) & (place < lengths[DRAFTS][slot])
            mixed = (position * 0x9E3779B1 + slot * 0x85EBCA77) & 0xFFFFFFFF
            mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
            drawn = (mixed ^ (mixed >> 13)) & (2**20 - 1)
            accepts = is_draft & (drawn < self._limits[place.clamp(0, NUM_DRAFTS - 1)])
            draft = self._ledger.ids[slot, position.clamp_max(self._ledger.ids.shape[1] - 1)]
            return Best(best.logit, torch.where(accepts, draft.to(best.token_id.dtype), best.token_id))

    def patched(steps: Any) -> None:
        make, plain = steps.__init__, steps._choice

        def init(self: Any, *given: Any) -> None:
            make(self, *given)
            self.limits = limits.to(self._ledger.device)

        def choice(self: Any, *given: Any) -> Any:
            found = plain(self, *given)
            return ByPattern(self._ops, self._ledger, self.limits) if type(found) is Argmax else found

        steps.__init__, steps._choice = init, choice

    patched(Captured)
    patched(EagerSteps)


def made(asked: argparse.Namespace, folder: Path) -> Path:
    """The engine."""
    from hemiola.builder.build import build
    from hemiola.builder.options import Options
    from hemiola.runtime.arch import arch_here

    engine_dir = folder / f"report-003-{asked.quantize}-{asked.at_once}-{asked.tp}"
    if not (engine_dir / "manifest.json").is_file():
        start = time.perf_counter()
        arch = arch_here() if torch.cuda.is_available() else asked.arch
        given: dict[str, Any] = {"max_len": asked.prompt + asked.answer + 64, "max_rows": asked.at_once}
        given |= {"max_step_tokens": asked.step_tokens, "num_drafts": NUM_DRAFTS}
        if asked.quantize != "none":
            given["quantize"] = asked.quantize
        build(asked.model, engine_dir, Options(arch=arch, random_weights=True, tp=asked.tp, **given))
        print(f"* built in {time.perf_counter() - start:.1f} s", flush=True)
    return engine_dir


class Load:
    """Requests of one kind, so many at once."""

    def __init__(self, llm: Any, asked: argparse.Namespace, num: int, seed: int) -> None:
        from hemiola.runtime.api import SamplingParams

        vocab_size = llm.config.vocab_size
        self.prompts = np.random.default_rng(seed).integers(0, vocab_size, (num, asked.prompt)).tolist()
        self.params = SamplingParams(max_tokens=asked.answer, temperature=0.0, ignore_eos=True)
        self.llm, self.num = llm, num
        self.sent, self.first, self.last = [0.0] * num, [0.0] * num, [0.0] * num
        self.tokens, self.failed = [0] * num, list[str]()
        self._next, self._left = 0, num
        self._lock, self._done = threading.Lock(), threading.Event()

    def run(self, at_once: int, tell: Callable[[float], None] = lambda seconds: None) -> float:
        """Seconds until all have ended. tell: hears now and then of how many there are so far."""
        start = time.perf_counter()
        for _ in range(min(at_once, self.num)):
            self._send()
        while not self._done.wait(TOLD):
            tell(time.perf_counter() - start)
        return time.perf_counter() - start

    def figures(self, seconds: float) -> dict[str, float]:
        """Of the requests that have ended by then."""
        ended = [n for n, last in enumerate(self.last) if last]
        ttft = sorted(1e3 * (self.first[n] - self.sent[n]) for n in ended)
        tpot = [1e3 * (self.last[n] - self.first[n]) / (self.tokens[n] - 1) for n in ended]
        return {
            "requests": len(ended),
            "tokens/s": sum(self.tokens) / seconds,
            "TPOT, ms": statistics.mean(tpot),
            "TTFT, ms (median)": statistics.median(ttft),
            "TTFT, ms (mean)": statistics.mean(ttft),
            "TTFT, ms (99 %)": ttft[int(0.99 * (len(ttft) - 1))],
        }

    def _send(self) -> None:
        with self._lock:
            if self._next == self.num:
                return
            n, self._next = self._next, self._next + 1
        self.sent[n] = time.perf_counter()
        self.llm.submit(self.prompts[n], self.params, lambda piece: self._note(n, piece))

    def _note(self, n: int, piece: Any) -> None:
        now = time.perf_counter()
        if piece.token_ids and not self.tokens[n]:
            self.first[n] = now
        self.tokens[n] += len(piece.token_ids)
        if piece.finish_reason is None:
            return
        self.last[n] = now
        if piece.finish_reason != "length":
            self.failed.append(str(piece.finish_reason))
        self._send()
        with self._lock:
            self._left -= 1
            if not self._left:
                self._done.set()


def measure(llm: Any, asked: argparse.Namespace) -> None:
    """The table's lines."""
    Load(llm, asked, asked.at_once, 1).run(asked.at_once)
    before = llm.counters.num_steps
    load = Load(llm, asked, asked.requests, 2)
    seconds = load.run(asked.at_once, lambda seconds: so_far(load, seconds))
    steps = llm.counters.num_steps - before
    print(f"\n| {seconds:.1f} s, {steps} steps | here | report 003 | goal |")
    print("|---|---|---|---|")
    for name, value in load.figures(seconds).items():
        print(f"| {name} | {value:,.1f} | {THEIRS.get(name, '')} | {GOALS.get(name, '')} |")
    print(f"failed: {load.failed or 'none'}; prompts {asked.prompt}, answers {asked.answer}", flush=True)


def so_far(load: Load, seconds: float) -> None:
    """A line, in case that this is ended before its time."""
    if any(load.last):
        print(
            f"* {seconds:.0f} s: {', '.join(f'{k} {v:,.1f}' for k, v in load.figures(seconds).items())}",
            flush=True,
        )


def decoding(llm: Any, asked: argparse.Namespace) -> None:
    """Milliseconds of a step while all rows decode, and tokens that a row gets in it."""
    import gpu_models

    from hemiola.runtime.api import SamplingParams

    prompts = (
        np.random.default_rng(3).integers(0, llm.config.vocab_size, (asked.at_once, asked.prompt)).tolist()
    )
    if asked.profile:
        import gpu_profile

        gpu_profile.decode(llm, prompts, f"a step with {asked.at_once} rows, the first GPU")
        other = np.random.default_rng(4).integers(0, llm.config.vocab_size, asked.prompt).tolist()
        gpu_profile.prompt(llm, other, f"a prompt of {asked.prompt}, the first GPU")
    found = gpu_models.decode(llm, prompts, (5, 65))[0]
    params = SamplingParams(max_tokens=201, temperature=0.0, ignore_eos=True)
    before = llm.counters.num_steps
    llm.generate(prompts[:1], params)
    steps = llm.counters.num_steps - before - 1
    print(
        f"* steps with {asked.at_once} rows: {found.step_ms:.2f} ms, GPU without a step {found.idle:.1%};"
        f" a row alone: {200 / steps:.2f} tokens a step",
        flush=True,
    )
    alone = Load(llm, asked, 5, 5)
    alone.run(1)
    print(f"* a prompt alone: {alone.figures(1)['TTFT, ms (median)']:.1f} ms to its first token", flush=True)


def opened(asked: argparse.Namespace, engine_dir: Path) -> Any:
    from hemiola.runtime.device import followers
    from hemiola.runtime.llm import LLM

    judge_by_pattern()
    followers.COMMAND = [sys.executable, __file__, "--follower"]
    start = time.perf_counter()
    llm = LLM(engine_dir, drafts="mtp", num_drafts=NUM_DRAFTS, adaptive_drafts=False)
    print(f"* ready after {time.perf_counter() - start:.1f} s; {llm.config.num_pages} pages", flush=True)
    return llm


def main() -> None:
    if sys.argv[1:2] == ["--follower"]:
        from hemiola.runtime.step import follower

        judge_by_pattern()
        follower.main()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4400)
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--quantize", default="fp8", help="or none")
    parser.add_argument("--arch", default="sm_90", help="where there is no GPU")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--engines", type=Path)
    parser.add_argument("--profile", action="store_true", help="kernels of a step, too")
    parser.add_argument("--build", action="store_true", help="build the engine, and no more")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine_dir = made(asked, asked.engines or Path(folder))
        if asked.build:
            return
        where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
        print(f"{where}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, --tp {asked.tp}", flush=True)
        with opened(asked, engine_dir) as llm:
            decoding(llm, asked)
            measure(llm, asked)


if __name__ == "__main__":
    main()
