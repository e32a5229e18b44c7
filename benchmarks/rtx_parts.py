"""Dense parts of engines of real dimensions, compiled by TensorRT-RTX for five architectures, without a GPU.

    python benchmarks/rtx_parts.py benchmarks/configs/qwen3.5-9b ...

Nothing is run. Weights are inputs of a part: only a config is read. Every part is built twice and the bytes
are compared. Prints a Markdown table.
"""

import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from hemiola.builder import graph, models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.onnx import to_onnx
from hemiola.builder.passes.cut import cut
from hemiola.builder.random_weights import RandomTensors
from hemiola.builder.targets import RTX
from hemiola.builder.targets.trt import rtx
from hemiola.builder.targets.trt.engines import make_profiles
from hemiola.runtime.outline import Limits

LIMITS = Limits(max_len=8192, max_rows=64, max_step_tokens=2048, num_drafts=3, page_len=64, chunk_len=16)


def main() -> None:
    print(f"TensorRT-RTX {rtx.trt.__version__}, one engine for {', '.join(RTX)}, {LIMITS!r}\n")
    print(
        "| config | segment | part | called | inputs | seconds of CPU | MiB | built again |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    totals: list[Sequence[object]] = []
    for folder in map(Path, sys.argv[1:]):
        checkpoint = Checkpoint(folder, RandomTensors)
        model = models.load(
            checkpoint, torch.ops.hemiola, chunk_len=16, max_len=LIMITS.max_len, dtype=torch.bfloat16
        )
        for name in ("trunk", "draft") if model.draft else ("trunk",):
            exported = graph.export(model, name, LIMITS)
            measure(folder.name, exported)
            totals += together(folder.name, exported)
    print("\n| config | segment | for | calls | different parts | seconds of CPU | MiB |")
    print("|---|---|---|---|---|---|---|")
    for row in totals:
        print("|", " | ".join(map(str, row)), "|")
    peaks = [
        resource.getrusage(who).ru_maxrss / 2**20 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    print(f"\nAt most {peaks[0]:.1f} GiB of memory, {peaks[1]:.1f} GiB in the process of a part.")


def cpu_seconds() -> float:
    """Of this process and of those that compiled."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + used.ru_utime + used.ru_stime


def measure(name: str, exported: graph.Graph) -> None:
    pieces, parts = cut(to_onnx(exported), exported.weights)
    calls = Counter(piece.name for piece in pieces if piece.kind == "part")
    for digest, part in parts.items():
        start = cpu_seconds()
        engine = rtx.engine(part, make_profiles(LIMITS, exported), RTX)
        seconds, size = cpu_seconds() - start, len(engine) / 2**20
        same = rtx.engine(part, make_profiles(LIMITS, exported), RTX) == engine
        row = (
            name,
            exported.name,
            digest[:6],
            calls[digest],
            len(part.graph.input),
            f"{seconds:.2f}",
            f"{size:.2f}",
            "same" if same else "OTHER BYTES",
        )
        print("|", " | ".join(map(str, row)), "|", flush=True)


def together(name: str, exported: graph.Graph) -> Iterator[Sequence[object]]:
    """All parts of a segment, for one architecture each and for all."""
    pieces, parts = cut(to_onnx(exported), exported.weights)
    calls = sum(piece.kind == "part" for piece in pieces)
    for archs in (*((arch,) for arch in RTX), RTX):
        start = cpu_seconds()
        size = sum(len(rtx.engine(part, make_profiles(LIMITS, exported), archs)) for part in parts.values())
        seconds = cpu_seconds() - start
        where = "all" if archs == RTX else archs[0]
        yield name, exported.name, where, calls, len(parts), f"{seconds:.2f}", f"{size / 2**20:.2f}"


if __name__ == "__main__":
    main()
