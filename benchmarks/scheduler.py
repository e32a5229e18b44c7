"""What a decode step costs outside the engine: plan + commit + reap, and everything but session.run.

    PYTHONPATH=. python benchmarks/scheduler.py [--tokenizer demo/qwen3.5-code]

Goal: plan + commit + reap <= 50 us + 1 us per row; all of it <= 300 us at 8 rows, detokenisation included.
The engine is a stub that answers with random logits. CPU time of the thread: a busy machine disturbs little.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.cache.eviction import Cost
from hemiola.runtime.config import Resolved
from hemiola.runtime.device.memory import Storage
from hemiola.runtime.device.session import Computed
from hemiola.runtime.open import make_loop
from hemiola.runtime.schedule.loop import Loop
from hemiola.runtime.schedule.request import Bounds, new_request
from hemiola.runtime.step.program import Batch
from hemiola.runtime.text import Text

VOCAB, PROMPT_LEN, NUM_STEPS, PAGE_LEN = 4096, 64, 300, 64
MAX_LEN = PROMPT_LEN + NUM_STEPS + 8


class Stub:
    """Answers at once."""

    recordings, ranks, slowest = (), None, None

    def __init__(self, num_rows: int) -> None:
        self.answers = [torch.randn(num_rows, VOCAB) for _ in range(8)]
        self.calls = 0

    def run(self, batch: Batch) -> Computed:
        self.calls += 1
        logits = self.answers[self.calls % len(self.answers)][: len(batch.logits_ids)]
        return Computed(logits, logits)


class Stopwatch:
    """Adds up the time inside the calls that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, call: Callable) -> Callable:
        def timed(*arguments: object) -> object:
            start = time.thread_time()
            result = call(*arguments)
            self.seconds += time.thread_time() - start
            return result

        return timed


def decoding_loop(num_rows: int, text: Text) -> Loop:
    """A loop whose rows have their prompts behind them."""
    config = Resolved(
        max_len=MAX_LEN, max_rows=num_rows, max_step_tokens=num_rows * PROMPT_LEN, page_len=PAGE_LEN,
        chunk_len=16, num_pages=num_rows * -(-MAX_LEN // PAGE_LEN) + 1, num_slots=2 * num_rows + 1,
        drafts="none", num_drafts=0, ngram_min=1, ngram_max=3, prefix_cache=True, snapshot_interval=0,
        pipeline_depth=0, adaptive_drafts=True, cuda_graphs=False, vocab_size=VOCAB,
        aging_s=30.0, host_cache_bytes=0, disk_cache_dir=None, disk_cache_bytes=0,
    )  # fmt: skip
    storage = Storage((), config.num_pages, config.num_slots)
    loop = make_loop(config, storage, Stub(num_rows), text, Cost(1, 1))
    bounds = Bounds(MAX_LEN, MAX_LEN, VOCAB, eos_ids=())
    for request_id in range(1, num_rows + 1):
        params = SamplingParams(max_tokens=NUM_STEPS + 5)
        request = new_request(request_id, [5] * PROMPT_LEN, params, bounds)
        loop.submit(request, lambda piece: None)
    loop.turn()
    assert all(request.committed_len == PROMPT_LEN for request in loop.scheduler.running)
    return loop


def measure(num_rows: int, text: Text) -> tuple[float, float]:
    """(plan + commit + reap, all outside the engine), both the median of decode steps, in us."""
    loop, watch = decoding_loop(num_rows, text), Stopwatch()
    for name in ("plan", "commit", "reap"):
        setattr(loop.scheduler, name, watch.wrap(getattr(loop.scheduler, name)))
    scheduling, outside = [], []
    for _ in range(NUM_STEPS):
        watch.seconds, start = 0.0, time.thread_time()
        loop.turn()
        outside.append(time.thread_time() - start)
        scheduling.append(watch.seconds)
    return statistics.median(scheduling) * 1e6, statistics.median(outside) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, default=Path("demo/qwen3.5-code"))
    text = Text(parser.parse_args().tokenizer)
    print("| rows | plan + commit + reap, us | goal | all outside the engine, us |\n|---|---|---|---|")
    for num_rows in (1, 8, 64, 256, 1024):
        scheduling, outside = measure(num_rows, text)
        print(f"| {num_rows} | {scheduling:.0f} | {50 + num_rows} | {outside:.0f} |")


if __name__ == "__main__":
    main()
