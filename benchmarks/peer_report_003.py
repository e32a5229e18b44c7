"""Report 003's load on vLLM: as many requests at once, prompts and answers as gpu_report_003.py has.

    PYTHONPATH=SITE PEER_EXTRA=OPTIONS python3 benchmarks/peer_report_003.py BENCH [--requests 128]

BENCH: the folder of the peer bundle's bench.py, whose engine "35b-mtp3" this is, with the options that
PEER_EXTRA adds (JSON). vLLM accepts drafts at fixed rates by itself. Its weights are dummies, with which a
router chooses few experts: steps are shorter than with a model's weights.
"""

import argparse
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

CONFIG = "35b-mtp3"
TOLD = 10.0  # seconds between two lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bench", type=Path)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4400)
    parser.add_argument("--answer", type=int, default=512)
    asked = parser.parse_args()
    sys.path.insert(0, str(asked.bench))
    import bench

    bench.env_setup(0)
    bench.WORK = bench.os.environ["PEER_WORK"]
    status = 1
    try:
        run = bench.Run(CONFIG, bench.os.path.join(bench.WORK, "report.jsonl"))
        load(run, asked, asked.at_once)  # what is compiled when it is first called is there then
        load(run, asked, asked.requests)
        status = 0
        run.eng.engine_core.shutdown()
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)  # as bench.py ends: what is left of vLLM may hang


def load(run: Any, asked: argparse.Namespace, num: int) -> None:
    """So many requests; a line now and then, and at the end."""
    sent: dict[str, float] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    tokens: dict[str, int] = {}
    start = told = time.perf_counter()
    while len(last) < num:
        while len(sent) < num and len(sent) - len(last) < asked.at_once:
            request = run.add(run.prompt(asked.prompt), asked.answer)
            sent[request], tokens[request] = time.perf_counter(), 0
        for output in run.eng.step():
            now, request = time.perf_counter(), output.request_id
            if (new := len(output.outputs[0].token_ids)) and not tokens[request]:
                first[request] = now
            tokens[request] += new
            if output.finished:
                last[request] = now
        if last and (len(last) == num or time.perf_counter() - told > TOLD):
            told = time.perf_counter()
            ttft = [1e3 * (first[one] - sent[one]) for one in last]
            tpot = [1e3 * (last[one] - first[one]) / (tokens[one] - 1) for one in last]
            speed = f"{sum(tokens.values()) / (told - start):,.1f} tokens/s"
            print(
                f"* {told - start:.1f} s: {len(last)} of {num} requests, {speed},"
                f" TPOT {statistics.mean(tpot):.2f} ms, TTFT {statistics.median(ttft):.0f} ms (median)",
                flush=True,
            )


if __name__ == "__main__":
    main()
