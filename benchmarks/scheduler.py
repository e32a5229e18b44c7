"""What a decode step costs outside the engine: plan + commit + reap, and everything but session.run.

    PYTHONPATH=. python benchmarks/scheduler.py [--tokenizer demo/qwen3.5-code]

Goal: plan + commit + reap <= 50 us + 1 us per row; all of it <= 300 us at 8 rows, detokenisation included.
The engine is a stub that answers with random logits. CPU time of the thread: a busy machine disturbs little.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from hemiola.runtime.accept import judge
from hemiola.runtime.batch import Batch, Feed, table_width
from hemiola.runtime.cache.pages import Pages
from hemiola.runtime.cache.slots import Slots
from hemiola.runtime.config import Resolved
from hemiola.runtime.loop import Loop
from hemiola.runtime.outbox import Outbox
from hemiola.runtime.request import Bounds, SamplingParams, new_request
from hemiola.runtime.scheduler import Plan, Scheduler
from hemiola.runtime.session import Output
from hemiola.runtime.text import Text

VOCAB, PROMPT_LEN, NUM_STEPS = 4096, 64, 300


class Stub:
    """Answers fast, and knows when it was called."""

    def __init__(self, num_rows: int) -> None:
        self.answers = [torch.randn(num_rows, VOCAB) for _ in range(8)]
        self.calls = 0

    def run(self, batch: Batch) -> Output:
        self.calls += 1
        logits = self.answers[self.calls % len(self.answers)][: len(batch.logits_ids)]
        return Output(logits, logits)


class Timed(Scheduler):
    """Adds up the time inside plan, commit and reap."""

    seconds = 0.0

    def plan(self) -> Plan:
        start = time.thread_time()
        plan = super().plan()
        self.seconds += time.thread_time() - start
        return plan

    def commit(self, plan: Plan, verdict: object) -> None:
        start = time.thread_time()
        super().commit(plan, verdict)
        self.seconds += time.thread_time() - start

    def reap(self, plan: Plan) -> None:
        start = time.thread_time()
        super().reap(plan)
        self.seconds += time.thread_time() - start


def measure(num_rows: int, text: Text | None) -> tuple[float, float]:
    """(plan + commit + reap, all outside the engine), both the median of decode steps, in us."""
    max_len = PROMPT_LEN + NUM_STEPS + 8
    config = Resolved(
        max_len=max_len, max_rows=num_rows, max_step_tokens=num_rows * PROMPT_LEN, page_len=64, chunk_len=16,
        num_drafts=0, pad_tokens=1, num_pages=num_rows * -(-max_len // 64) + 1, num_slots=num_rows + 1,
    )  # fmt: skip
    slots = Slots(config.num_slots, config.chunk_len)
    pages = Pages(config.num_pages, config.page_len, config.num_slots, table_width(config))
    scheduler = Timed(config, pages, slots)
    loop = Loop(scheduler, Feed(config, pages, slots), Stub(num_rows), judge, Outbox(text))
    bounds = Bounds(max_len, max_len, VOCAB, eos_ids=())
    for request_id in range(num_rows):
        request = new_request(
            request_id + 1, [5] * PROMPT_LEN, SamplingParams(max_tokens=NUM_STEPS + 5), bounds
        )
        loop.submit(request, lambda piece: None)
    while not scheduler.running or any(r.committed_len < PROMPT_LEN for r in scheduler.running):
        loop.turn()
    scheduling, outside = [], []
    for _ in range(NUM_STEPS):
        scheduler.seconds = 0.0
        start = time.thread_time()
        loop.turn()
        outside.append(time.thread_time() - start)
        scheduling.append(scheduler.seconds)
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
