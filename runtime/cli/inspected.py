"""What `hemiola inspect` shows: tables for people, an object for programs."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from hemiola.runtime.arch import ARCHS, split
from hemiola.runtime.cli.graph_plot import spans
from hemiola.runtime.cli.stored_weights import stored_weights
from hemiola.runtime.config import ENDLESS, Resolved, ServeConfig, resolve, state_bytes
from hemiola.runtime.errors import one_line
from hemiola.runtime.manifest import Manifest
from hemiola.runtime.manifest_parts import Segment
from hemiola.runtime.progress import size

PROMISES = {
    "bits": "every logit is the plain run's, bit for bit",
    "tokens": "tokens of the plain run, where no two are closer than rounding (docs/engines.md)",
}
CALLBACK = "python callback"
SHORT = {"float8_e4m3fn": "e4m3"}  # dtypes that are known by another name


def show(engine_dir: Path, engine: Manifest, config: ServeConfig) -> None:
    """Tables for people."""
    plan = memory(engine_dir, engine, config)
    console = Console(markup=False, emoji=False)
    console.print(facts(engine_dir, engine))
    console.print(states(engine))
    console.print(segments(engine_dir, engine))
    if any(segment.layouts for segment in engine.segments):
        console.print(weights(engine_dir, engine))
    if any(segment.profiles for segment in engine.segments):
        console.print(profiles(engine))
    console.print(forms(engine))
    if engine.kernels:
        console.print(kernels(engine_dir, engine))
    console.print(plan)


def facts(engine_dir: Path, engine: Manifest) -> Table:
    """One line each."""
    table = Table(title=one_line(engine_dir), show_header=False)
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(engine.layers).items())
    files, ranks = engine.weights_files(0), f"{engine.tp}, each with its part of heads, widths and vocabulary"
    page_bytes = state_bytes(engine.states, "page")
    for name, value in {
        **({"checkpoint": f"{engine.repo} on the Hub, commit {engine.commit}"} if engine.repo else {}),
        "architecture": engine.architecture,
        "layers": f"{len(engine.layers)}: {kinds}",
        "vocabulary, hidden": f"{engine.vocab_size}, {engine.hidden_size}",
        "target, architecture": f"{engine.target}, {engine.arch}",
        **({"ranks": ranks} if engine.tp > 1 else {}),
        "computes in": computes_in(engine),
        "promise": PROMISES[engine.promise],
        "drafts": engine.drafts
        + (f", chosen among the {engine.draft_vocab} lowest ids" if engine.draft_vocab else "")
        + (f", by a copy of the head in {engine.draft_head}" if engine.draft_head else ""),
        "tokenizer": "tokenizer.json" if engine.has_tokenizer else "none: takes and gives token ids",
        **({"inputs of FP8 layers": engine.act_dtype} if _has_fp8(engine) else {}),
        "keys and values": f"{engine.kv_dtype}, {page_bytes // engine.limits.page_len:,} bytes a token",
        "end tokens": ", ".join(map(str, engine.eos_ids)),
        **{name: str(value) for name, value in engine.limits.model_dump().items()},
        "weights": size(_bytes_of(engine_dir, files)) + (" of each rank" if engine.tp > 1 else ""),
        **({"random weights": f"{size(engine.drawn_bytes)}, drawn when opened"} if engine.drawn else {}),
        "built by": f"hemiola {engine.builder_version}, torch {engine.torch_version}",
        "identity": engine.identity[:16],
    }.items():
        table.add_row(name, value)
    return table


def _has_fp8(engine: Manifest) -> bool:
    return any(text.startswith("e4m3") for segment in engine.segments for text in segment.layouts.values())


def computes_in(engine: Manifest) -> str:
    """Of engines for a GPU, which may be in either, kernels tell."""
    kinds = " ".join(
        kind for kernels in engine.kernels for one in kernels.binaries for kind in one.binary.call.kinds
    )
    usual = ARCHS[split(engine.arch)[0]].dtype
    return "float32" if kinds and "bf16" not in kinds else usual


def states(engine: Manifest) -> Table:
    """Equal states of equal layers in one line."""
    slot, page = (state_bytes(engine.states, kind) for kind in ("slot", "page"))
    table = Table(
        title=f"states: {size(slot)} per slot, {size(page)} per page of {engine.limits.page_len} tokens"
    )
    for column in ("state", "layers", "kind", "shape of one", "dtype", "bytes of one"):
        table.add_column(column, justify="right" if column.startswith("bytes") else "left")
    groups: dict[tuple, list[int]] = defaultdict(list)
    for state in engine.states:
        number = re.search(r"layers\.(\d+)\.", state.name)
        name = re.sub(r"layers\.\d+\.", "", state.name)
        one = state_bytes([state], state.kind)
        shape, dtype = "x".join(map(str, state.shape)), SHORT.get(state.dtype, state.dtype)
        key = name, state.kind, shape, dtype, f"{one:,}"
        groups[key] += [int(number[1])] if number else []
    for (name, *rest), layers in groups.items():
        table.add_row(name, spans(layers), *rest)
    return table


def segments(engine_dir: Path, engine: Manifest) -> Table:
    """What each is called with, and its files."""
    table = Table(title="segments")
    for column in ("segment", "runs", "size", "weights", "states", "inputs"):
        table.add_column(column)
    for segment in engine.segments:
        total = size(_bytes_of(engine_dir, segment.files))
        counts = str(len(segment.weights)), str(len(segment.states))
        table.add_row(segment.name, runs(segment), total, *counts, " ".join(segment.inputs))
    return table


def weights(engine_dir: Path, engine: Manifest) -> Table:
    """Formats of quantised weights. Whatever a weight is stored as, activations and sums are wide."""
    table = Table(title=f"weights: codes are widened to fp32, activations are {computes_in(engine)}")
    for column in ("weight", "layers", "stored as", "bytes"):
        table.add_column(column, justify="right" if column == "bytes" else "left")
    for group in stored_weights(engine_dir, engine):
        table.add_row(group.name, spans(group.layers), group.stored, f"{group.num_bytes:,}")
    return table


def runs(segment: Segment) -> str:
    """What it consists of."""
    if not segment.pieces:
        return segment.file
    calls = sum(piece.kind == "part" for piece in segment.pieces)
    return f"{calls} parts, {len(segment.files)} of them different, by {segment.compiler}"


def profiles(engine: Manifest) -> Table:
    """The sizes that compiled parts take."""
    table = Table(title="profiles of compiled parts: least, usual and most")
    for column in ("segment", "profile", "sizes"):
        table.add_column(column)
    for segment in engine.segments:
        for profile in segment.profiles:
            ranges = (f"{name} {a}/{b}/{c}" for name, (a, b, c) in profile.sizes.items())
            table.add_row(segment.name, profile.name, ", ".join(ranges))
    return table


def forms(engine: Manifest) -> Table:
    """How often each op runs in each form."""
    table = Table(title="ops, the form that each runs in, and why better ones refused")
    for column in ("segment", "op", "form", "calls", "refused"):
        table.add_column(column, justify="right" if column == "calls" else "left")
    for segment in engine.segments:
        kinds = Counter(
            (
                node.op,
                CALLBACK if node.is_callback else node.form,
                "; ".join(f"{form}: {why}" for form, why in node.refused.items()),
            )
            for node in segment.calls
        )
        for (op, form, refused), count in sorted(kinds.items()):
            table.add_row(segment.name, op, form, str(count), refused)
    return table


def kernels(engine_dir: Path, engine: Manifest) -> Table:
    """Binaries of our ops by architecture."""
    table = Table(title="kernels")
    for column in ("architecture", "binaries", "size", "CUDA"):
        table.add_column(column)
    for group in engine.kernels:
        total = _bytes_of(engine_dir, [binary.file for binary in group.binaries])
        table.add_row(group.arch, str(len(group.binaries)), size(total), str(group.cuda))
    return table


def memory(engine_dir: Path, engine: Manifest, config: ServeConfig) -> Table:
    """What opening the engine like this takes; where the cache has no bound, all that it could use."""
    sizes = resolve(config, engine, ENDLESS)
    title = f"memory for {sizes.max_rows} rows of {sizes.max_len} tokens, drafts: {sizes.drafts}"
    table = Table(title=title)
    for column in ("what", "number", "each", "together"):
        table.add_column(column, justify="left" if column == "what" else "right")
    lines = memory_of(engine_dir, engine, sizes)
    for what, number, each in lines:
        table.add_row(what, f"{number:,}", size(each), size(number * each))
    table.add_row("", "", "", size(sum(number * each for _, number, each in lines)))
    return table


class Held(NamedTuple):
    """Things of one size in memory."""

    what: str
    number: int
    each_bytes: int


def memory_of(engine_dir: Path, engine: Manifest, sizes: Resolved) -> list[Held]:
    """All that an open engine holds."""
    slot, page = (state_bytes(engine.states, kind) for kind in ("slot", "page"))
    weights = _bytes_of(engine_dir, engine.weights_files(0)) + engine.drawn_bytes
    rows = sizes.max_rows + 1
    held = [
        Held("weights", 1, weights),
        Held("pages", sizes.num_pages, page),
        Held("slots of rows, and one of padding", rows, slot),
        Held("snapshots", sizes.num_slots - rows, slot),
    ]
    return held + [Held("the largest step", 1, engine.work_bytes)] * bool(engine.work_bytes)


def described(engine_dir: Path, engine: Manifest, config: ServeConfig) -> dict[str, Any]:
    """The same as the tables, for programs: numbers are numbers, and sizes are bytes."""
    same = (
        "repo",
        "commit",
        "architecture",
        "layers",
        "vocab_size",
        "hidden_size",
        "target",
        "arch",
        "tp",
        "promise",
        "act_dtype",
    )
    same += ("drafts", "kv_dtype", "draft_vocab", "draft_head", "has_tokenizer", "eos_ids", "builder_version")
    same += ("torch_version", "identity")
    sizes = resolve(config, engine, ENDLESS)
    held = memory_of(engine_dir, engine, sizes)
    return {
        "engine_dir": str(engine_dir),
        **{name: getattr(engine, name) for name in same},
        "computes_in": computes_in(engine),
        "limits": engine.limits.model_dump(),
        "bytes_per_slot": state_bytes(engine.states, "slot"),
        "bytes_per_page": state_bytes(engine.states, "page"),
        "states": [
            {**state.model_dump(), "bytes": state_bytes([state], state.kind)} for state in engine.states
        ],
        "quantised_weights": [group._asdict() for group in stored_weights(engine_dir, engine)],
        "segments": [_described(engine_dir, segment) for segment in engine.segments],
        "kernels": [
            {
                "arch": group.arch,
                "binaries": len(group.binaries),
                "bytes": _bytes_of(engine_dir, [binary.file for binary in group.binaries]),
                "cuda": group.cuda,
            }
            for group in engine.kernels
        ],
        "memory": {
            "max_rows": sizes.max_rows,
            "max_len": sizes.max_len,
            "drafts": sizes.drafts,
            "held": [one._asdict() for one in held],
            "bytes": sum(one.number * one.each_bytes for one in held),
        },
    }


def _described(engine_dir: Path, segment: Segment) -> dict[str, Any]:
    calls = Counter((node.op, CALLBACK if node.is_callback else node.form) for node in segment.calls)
    return {
        "name": segment.name,
        "runs": runs(segment),
        "bytes": _bytes_of(engine_dir, segment.files),
        "num_weights": len(segment.weights),
        "states": segment.states,
        "inputs": segment.inputs,
        "ops": [{"op": op, "form": form, "calls": number} for (op, form), number in sorted(calls.items())],
    }


def _bytes_of(engine_dir: Path, files: Iterable[str]) -> int:
    return sum((engine_dir / file).stat().st_size for file in files)
