"""Our kernels for TensorRT, told ahead of time, for real dimensions and any architecture, without a GPU.

    python benchmarks/tensorrt_ptx.py sm_80,sm_90 benchmarks/configs/qwen3.5-9b demo/qwen3.5-code ...

Every kernel is assembled with the parameters that TensorRT passes. Prints a Markdown table: KiB of PTX, and
KiB of the most shared memory.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from triton.backends.nvidia.compiler import get_ptxas

from hemiola.builder import graph, models
from hemiola.builder.checkpoint import Checkpoint, Files
from hemiola.builder.random_weights import RandomTensors
from hemiola.builder.targets.kernels import nodes_of
from hemiola.builder.targets.torch import Job
from hemiola.builder.targets.trt.engines import lay_out
from hemiola.builder.targets.trt.nodes import told_beforehand
from hemiola.builder.targets.trt.ptx import Ahead
from hemiola.plugins import OPS
from hemiola.runtime.arch import ARCHS
from hemiola.runtime.outline import Limits

LIMITS = Limits(max_len=8192, max_rows=64, max_step_tokens=2048, num_drafts=3, page_len=64, chunk_len=16)


def main() -> None:
    archs = sys.argv[1].split(",")
    print("| config | op | plugins |", " | ".join(archs), "|")
    print("|---|---|---|" + "---|" * len(archs))
    for folder in map(Path, sys.argv[2:]):
        has_weights = any(folder.glob("*.safetensors"))
        checkpoint = Checkpoint(folder, Files if has_weights else RandomTensors)
        model = models.load(
            checkpoint, torch.ops.hemiola, chunk_len=16, max_len=LIMITS.max_len, dtype=torch.bfloat16
        )
        exported = graph.export(model, "trunk", LIMITS)
        lay_out(exported)
        found = [measured(arch, exported) for arch in archs]
        for op in found[0]:
            plugins = {own[op].plugins for own in found}
            cells = (folder.name, op, ", ".join(map(str, plugins)), *(own[op].said for own in found))
            print("|", " | ".join(cells), "|", flush=True)


class Measured(NamedTuple):
    plugins: int
    said: str


def measured(arch: str, exported: graph.Graph) -> dict[str, Measured]:
    """By op: how many plugins, and KiB of PTX with the most shared memory, or why not."""
    found = told_beforehand(exported, Job(Path(), "cuda", (arch,), LIMITS))
    ops = [node.op for node in nodes_of(exported) if not OPS[node.op].has_onnx_body]
    made = {}
    for op, own in dict(zip(ops, found, strict=True)).items():
        if not isinstance(own, Ahead):
            made[op] = Measured(0, f"python callback: {own}")
            continue
        for entry in own.entries:
            assemble(entry.ptx, arch)
        size = sum(len(entry.ptx) for entry in own.entries) / 1024
        made[op] = Measured(
            len(own.entries), f"{size:.0f}, {max(entry.shared for entry in own.entries) / 1024:.1f}"
        )
    return made


def assemble(ptx: str, arch: str) -> None:
    """Raises CalledProcessError where the assembler does not take it."""
    major, minor = ARCHS[arch].capability or (0, 0)
    target = next(line.split()[1] for line in ptx.splitlines() if line.startswith(".target"))
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "a.ptx").write_text(ptx)
        command = [get_ptxas(10 * major + minor).path, f"-arch={target}", str(file), "-o", f"{file}.cubin"]
        subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    main()
