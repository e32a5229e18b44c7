"""Memory and time of a build: layers of a 35B-A3B with random codes, of the real shapes.

PYTHONPATH=. python benchmarks/packing_cpu.py fp8|int4 [--layers 4] [--narrow 1] [--stacked] [--vocab 248320]
    [--folder build]

The checkpoint is written layer by layer; embeddings and the output head are holes, which take no disk.
Each layer is 0.84 GB in FP8 and 0.43 GB in INT4, once in the checkpoint and once in the engine. Both are
deleted. `--narrow N` divides widths by N, and leaves the numbers of layers, experts and tensors;
`--stacked`: a layer's experts lie in two tensors.
"""

import argparse
import json
import math
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from hemiola.builder import models
from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.formats.rounded import KEPT
from hemiola.builder.lazy import Lazy
from hemiola.builder.random_weights import RandomTensors
from hemiola.plugins import references

NUM_LAYERS = 40
CONFIG = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
    "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "attn_output_gate": True, "hidden_act": "silu", "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32", "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144, "tie_word_embeddings": False,
}  # fmt: skip
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
QUANTISED = {
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": INT4, "targets": ["Linear"]}},
    },
}  # fmt: skip
# The build, which writes down its own peak: that of a child counts what its parent had before it.
WATCHED = """
import atexit, pathlib, runpy, sys
lines = lambda: open("/proc/self/status").readlines()
peak = pathlib.Path(sys.argv[1], "peak")
atexit.register(lambda: peak.write_text(next(line for line in lines() if line.startswith("VmHWM"))))
runpy.run_module("hemiola.builder", run_name="__main__", alter_sys=True)
"""
WIDTHS = ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size")
NAMES = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.int32: "I32"}


class Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    value: float | None = None  # None: random bytes; 0: a hole

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Shapes(RandomTensors):
    """What a family asks for, written down."""

    def __init__(self, checkpoint: Checkpoint, is_stacked: bool) -> None:
        super().__init__(checkpoint)
        self.plain, self.matrices, self._is_stacked = {}, {}, is_stacked

    def any(self, prefix: str) -> bool:
        return super().any(prefix) and (self._is_stacked or not prefix.endswith("experts.gate_up_proj"))

    def tensor(self, name: str, *shape: int) -> Lazy:
        self.plain[name] = shape
        return super().tensor(name, *shape)

    def matrix(self, name: str, *shape: int) -> Lazy:
        (self.plain if KEPT.search(name) else self.matrices)[name] = shape
        return super().tensor(name, *shape)


def entries(folder: Path, kind: str, is_stacked: bool) -> Iterator[Entry]:
    found: list[Shapes] = []
    checkpoint = Checkpoint(folder, lambda opened: found.append(Shapes(opened, is_stacked)) or found[0])
    models.load(checkpoint, references, chunk_len=16, max_len=64)
    for name, shape in found[0].plain.items():
        is_large = math.prod(shape) > 2**26
        yield Entry(name, torch.bfloat16, shape, 0 if is_large else 0.5)
    for name, (*outer, num_outputs, num_inputs) in found[0].matrices.items():
        spans, beside = -(-num_inputs // 128), f"{name}_"  # X.weight_scale, or X_scale of a stack
        if kind == "fp8":
            yield Entry(name, torch.float8_e4m3fn, (*outer, num_outputs, num_inputs))
            grid = (*outer, -(-num_outputs // 128), spans)
            yield Entry(f"{beside}scale_inv", torch.bfloat16, grid, 0.01)
        else:
            yield Entry(f"{beside}packed", torch.int32, (*outer, num_outputs, num_inputs // 8))
            yield Entry(f"{beside}scale", torch.bfloat16, (*outer, num_outputs, spans), 0.01)


def content(entry: Entry) -> torch.Tensor:
    if entry.value is not None:
        return torch.full(entry.shape, entry.value, dtype=entry.dtype)
    codes = torch.randint(-(2**63), 2**63 - 1, (entry.num_bytes // 8,)).view(torch.uint8)
    return codes & 0xBF if entry.dtype is torch.float8_e4m3fn else codes  # below 2, and no NaN


def write(path: Path, found: list[Entry]) -> None:
    """A safetensors file."""
    header, offset = {}, 0
    for entry in found:
        end = offset + entry.num_bytes
        header[entry.name] = {
            "dtype": NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [offset, end]
        }  # fmt: skip
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in found:
            if entry.value == 0:
                file.seek(entry.num_bytes, 1)
            else:
                file.write(content(entry).contiguous().view(-1).view(torch.uint8).numpy().data)
        file.truncate(8 + len(text) + offset)


def make(
    folder: Path, kind: str, num_layers: int, vocab_size: int, narrow: int = 1, is_stacked: bool = False
) -> int:
    """Bytes of the checkpoint."""
    config = CONFIG | {"num_hidden_layers": num_layers, "quantization_config": QUANTISED[kind]}
    config |= {key: config[key] // narrow for key in WIDTHS}
    config |= {"vocab_size": vocab_size, "eos_token_id": vocab_size - 1}
    (folder / "config.json").write_text(json.dumps(config))
    places, total = {}, 0

    def layer_of(entry: Entry) -> str:
        return ".".join(entry.name.split(".")[:3]) if ".layers." in entry.name else "rest"

    ordered = sorted(entries(folder, kind, is_stacked), key=layer_of)
    for number, (_, group) in enumerate(groupby(ordered, layer_of)):
        found, file = list(group), f"model-{number:05}.safetensors"
        write(folder / file, found)
        places |= {entry.name: file for entry in found}
        total += sum(entry.num_bytes for entry in found)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind", choices=QUANTISED)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--vocab", type=int, default=248320, help="1 GB of the engine each 248,320 rows, twice"
    )
    parser.add_argument("--narrow", type=int, default=1)
    parser.add_argument("--stacked", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("build"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    try:
        num_bytes = make(args.folder, args.kind, args.layers, args.vocab, args.narrow, args.stacked)
        engine = args.folder / "engine"
        command = [sys.executable, "-c", WATCHED, str(args.folder), "--engine-dir", str(engine)]
        command += ["--max-len", "1024", "--drafts", "none"]
        begin = time.monotonic()
        subprocess.run(command, check=True)
        wall, used = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        written = sum(file.stat().st_size for file in engine.rglob("*"))
        peak = int((args.folder / "peak").read_text().split()[1])
        print(
            f"{args.kind}, {args.layers} of {NUM_LAYERS} layers, 1/{args.narrow} of the widths,"
            f" {args.vocab} tokens: {num_bytes / 1e9:.2f} GB in, {written / 1e9:.2f} GB out, {wall:.0f} s"
            f" ({used.ru_utime + used.ru_stime:.0f} s of CPU), {peak / 1024:.0f} MiB at most"
        )
    finally:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
