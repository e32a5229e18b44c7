"""How an engine's weights are stored: formats and bytes of each group of equal layers."""

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from hemiola.plugins.groups import Layout
from hemiola.runtime.errors import Refused, one_line
from hemiola.runtime.manifest import Manifest

REST = "what is not quantised"
INPUTS = {"group": "e4m3 by 128 of a token", "token": "e4m3 by token", "static": "e4m3 by one scale"}


class StoredWeights(NamedTuple):
    """Weights of one name, over layers."""

    name: str
    layers: list[int]
    stored: str  # how
    num_bytes: int


def stored_weights(engine_dir: Path, manifest: Manifest) -> list[StoredWeights]:
    """Quantised ones by name and layout, then all others; empty where none is quantised. Raises Refused for a
    file that is damaged."""
    layouts = {name: text for segment in manifest.segments for name, text in segment.layouts.items()}
    if not layouts:
        return []
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    for path in (engine_dir / file for file in manifest.weights_files(0)):  # other ranks have the same
        for name, num_bytes in _stored(path).items():
            key = (REST, "")
            if (weight := name.removesuffix(".scales")) in layouts:
                key = (re.sub(r"layers\.\d+\.", "", weight, count=1), described(layouts[weight]))
                number = re.search(r"layers\.(\d+)\.", name)
                groups[key] += [int(number[1])] if number and name == weight else []
            sizes[key] += num_bytes
    ordered = sorted(sizes, key=lambda key: (key[0] == REST, key))
    return [StoredWeights(name, sorted(groups[name, how]), how, sizes[name, how]) for name, how in ordered]


def _stored(path: Path) -> dict[str, int]:
    """Bytes of a file's tensors, by name."""
    try:
        with safe_open(path, framework="pt") as file:
            headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: _num_bytes(one.get_dtype(), one.get_shape()) for name, one in headers.items()}
    except SafetensorError as error:
        message = f"{path} cannot be read ({one_line(error)})"
        raise Refused("damaged", message=message, way_out="run build-engine again") from None


def described(layout: str) -> str:
    """For people: the codes, and how many inputs of an output share a scale."""
    parsed = Layout.parse(layout)
    with_zeros = " with zero points" if "zeros" in parsed.others else ""
    by = f", inputs {INPUTS[parsed.inputs]}" if parsed.inputs else ""
    return f"{parsed.kind} by {parsed.span or 'output'}{with_zeros}{by}"


def _num_bytes(dtype: str, shape: list[int]) -> int:
    total = {"U8": 1, "BF16": 2, "F16": 2}.get(dtype, 4)
    for length in shape:
        total *= length
    return total
