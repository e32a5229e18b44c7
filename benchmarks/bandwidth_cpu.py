"""How much of a CPU's memory bandwidth decoding uses: a model of real dimensions with random bf16 weights.

PYTHONPATH=. python benchmarks/bandwidth_cpu.py [--model NAME] [--threads 2] [--tokens 40] [--repeats 3]

One request. A token reads every weight once (of untied embeddings a line); the bandwidth is that at which as
many threads copy memory, reads and writes counted, both the best of the repeats. It also says how much memory
the process took, beside weights and caches.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.runtime import manifest
from hemiola.runtime.api import SamplingParams
from hemiola.runtime.device.session import load_weights
from hemiola.runtime.llm import LLM

CONFIGS = Path(__file__).parent / "configs"
COPIED = 2**29  # bytes that a thread copies


def copy_bandwidth(num_threads: int, repeats: int) -> float:
    """Bytes read and written per second."""
    pairs = [(torch.ones(COPIED // 4), torch.zeros(COPIED // 4)) for _ in range(num_threads)]

    def copy() -> None:
        threads = [threading.Thread(target=target.copy_, args=(source,)) for source, target in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    torch.set_num_threads(1)  # the threads here are ours
    return 2 * num_threads * COPIED / least(copy, repeats)


def least(call: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def bytes_of_weights(engine_dir: Path) -> int:
    """Of the trunk, which may exist as a recipe for random numbers only."""
    found = manifest.load(engine_dir)
    names = set(found.segment("trunk").weights)
    return sum(w.nbytes for w in load_weights(engine_dir, found, names, torch.device("cpu")).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-0.8b", choices=sorted(p.name for p in CONFIGS.iterdir()))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    bandwidth = copy_bandwidth(args.threads, args.repeats)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        engine_dir = Path(folder) / "engine"
        build(CONFIGS / args.model, engine_dir, Options(random_weights=True, max_len=1024, drafts="none"))
        weights = bytes_of_weights(engine_dir)
        before = status("VmRSS")
        with LLM(engine_dir, max_rows=1, cache_bytes=2**28, prefix_cache=False) as llm:

            def generate(num_tokens: int) -> Callable[[], object]:
                params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
                return lambda: llm.generate([[5, 6, 7]], params)

            generate(2)()
            first = least(generate(1), args.repeats)
            seconds = (least(generate(1 + args.tokens), args.repeats) - first) / args.tokens
        taken = status("VmHWM") - before
    print("| model | threads | weights | copy | ms a token | of the bandwidth | memory taken |")
    print("|---|---|---|---|---|---|---|")
    cells = [args.model, args.threads, f"{weights / 1e9:.2f} GB", f"{bandwidth / 1e9:.1f} GB/s"]
    share = weights / seconds / bandwidth
    print(
        "|", *(f"{cell} |" for cell in cells), f"{1e3 * seconds:.1f} | {share:.0%} | {taken / 1e9:.2f} GB |"
    )


if __name__ == "__main__":
    main()
