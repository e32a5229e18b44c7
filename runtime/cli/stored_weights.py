"""How an engine's weights are stored: formats and bytes of each group of equal layers."""

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from hemiola.plugins import OPS
from hemiola.plugins.groups import Layout
from hemiola.runtime.device.program import load_program
from hemiola.runtime.manifest import Manifest, Segment

REST = "what is not quantised"


class StoredWeights(NamedTuple):
    """Weights of one name, over layers."""

    name: str
    layers: list[int]
    stored: str  # how
    num_bytes: int


def layouts_of(engine_dir: Path, segment: Segment) -> dict[str, str]:
    """Of a segment's quantised weights, by name."""
    if not any(node.layouts for node in segment.nodes):
        return {}
    program = load_program(engine_dir / segment.file)
    names = dict(zip(program.graph.nodes, segment.weights, strict=False))
    ours = {op.torch_op: op for op in OPS.values()}
    calls = [node for node in program.graph.nodes if node.target in ours]
    found = {}
    for node, chosen in zip(calls, segment.nodes, strict=True):
        for arg, value in zip(ours[node.target].args, node.args, strict=False):
            if arg.name in chosen.layouts:
                found[names[value]] = chosen.layouts[arg.name]
    return found


def stored_weights(engine_dir: Path, manifest: Manifest) -> list[StoredWeights]:
    """Quantised ones by name and layout, then all others; empty where none is quantised."""
    layouts: dict[str, str] = {}
    for segment in manifest.segments:
        layouts |= layouts_of(engine_dir, segment)
    if not layouts:
        return []
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    with safe_open(engine_dir / manifest.weights_file, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            header = file.get_slice(name)
            key = (REST, "")
            if name in layouts:
                key = (re.sub(r"layers\.\d+\.", "", name, count=1), described(layouts[name]))
                number = re.search(r"layers\.(\d+)\.", name)
                groups[key] += [int(number[1])] if number else []
            sizes[key] += _num_bytes(header.get_dtype(), header.get_shape())
    ordered = sorted(sizes, key=lambda key: (key[0] == REST, key))
    return [StoredWeights(name, sorted(groups[name, how]), how, sizes[name, how]) for name, how in ordered]


def described(layout: str) -> str:
    """For people: the codes, and how many inputs of an output share a scale."""
    found = Layout.parse(layout)
    with_zeros = " with zero points" if "zeros" in found.others else ""
    return f"{found.kind} by {found.span or 'output'}{with_zeros}"


def _num_bytes(dtype: str, shape: list[int]) -> int:
    total = {"U8": 1, "BF16": 2, "F16": 2}.get(dtype, 4)
    for length in shape:
        total *= length
    return total
