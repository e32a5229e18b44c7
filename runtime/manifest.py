"""The contract between builder and runtime: `manifest.json`, which says what an engine is."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from pydantic import ConfigDict, Field

from hemiola.plugins import OPS
from hemiola.plugins.attention.pages import FORMATS
from hemiola.plugins.gpu.binaries import sources
from hemiola.runtime.arch import name_of
from hemiola.runtime.errors import Refused, shown
from hemiola.runtime.manifest_parts import GROUP, HIDDEN, PTX, Drawn, Kernels, Line, RepoName, Segment
from hemiola.runtime.options import KvDtype
from hemiola.runtime.outline import (
    FILE,
    MOST_LINES,
    FileName,
    Outline,
    Size,
    Word,
    check_build,
    check_content,
    find,
    read,
    seal_of,
    validated,
)

NARROW = {"float8_e4m3fn", "uint8"}  # dtypes of pages alone
Target = Literal["torch", "onnxruntime", "tensorrt-rtx", "tensorrt"]
MOST_PAGES = 2**24  # that all rows of a step can name, and so the entries of a table on the host


class Manifest(Outline):
    """Everything the runtime knows of an engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo: RepoName = ""  # the checkpoint's name on the Hub, if it came from there
    commit: Word = ""  # of the checkpoint there
    architecture: Word
    layers: tuple[Word, ...] = Field(max_length=MOST_LINES)  # mamba2, attention, mlp, moe, delta
    hidden_size: Size
    target: Target
    promise: Literal["bits", "tokens"]  # what every run has in common with the plain run
    draft_vocab: Size | None = None  # an MTP head has logits of so many of the lowest ids; None: of all
    draft_head: Literal["fp8", "int4"] | None = (
        None  # the codes of the head that it reads; None: the trunk's head
    )
    kv_dtype: KvDtype  # what pages hold
    act_dtype: Word  # of inputs of FP8 layers: fp8, or what the engine computes in (builder/options.py)
    sum_segments: Literal[1, 8] = 1  # of what ranks add; 8: bits do not depend on tp
    weights_file: FileName
    rank_files: tuple[FileName, ...] = ()  # of each rank, with its parts of weights that are cut
    drawn: dict[Word, Drawn]  # weights that are random numbers and stand in no file, by name
    segments: tuple[Segment, ...]
    kernels: tuple[Kernels, ...]  # one for each architecture of a GPU
    ops: dict[Word, Line]  # schemas of the ops that the segments call, by name

    def seal(self) -> str:
        """The identity this manifest should carry."""
        return seal_of(self.model_dump(mode="json"))

    def write(self, engine_dir: Path) -> "Manifest":
        """Seal and store; returns the sealed manifest. Written last, so no broken build leaves one."""
        sealed = self.model_copy(update={"identity": self.seal()})
        text = json.dumps(sealed.model_dump(mode="json"), indent=1)
        (engine_dir / FILE).write_text(text + "\n")
        return sealed

    @property
    def drawn_bytes(self) -> int:
        """Memory of the weights that stand in no file."""
        return sum(drawn.nbytes for drawn in self.drawn.values())

    def weights_files(self, rank: int) -> tuple[str, ...]:
        """What a rank reads."""
        return (self.weights_file, *self.rank_files[rank : rank + 1])

    @property
    def callbacks(self) -> dict[str, str]:
        """Ops that TensorRT calls in Python, and why."""
        nodes = (node for segment in self.segments for node in segment.nodes)
        return {node.op: node.refused[PTX] for node in nodes if node.is_callback}

    @property
    def work_bytes(self) -> int:
        """Memory of the largest step: segments run one after the other."""
        return max(segment.work_bytes for segment in self.segments)

    def segment(self, name: str) -> Segment:
        return next(s for s in self.segments if s.name == name)


def load(engine_dir: Path) -> Manifest:
    """Read and check an engine's manifest and the files it names. Raises Refused with the reason."""
    path = find(engine_dir)
    manifest = parse(path)
    check_build(path, manifest, manifest.seal())
    _check_ops(path, manifest)
    check_content(engine_dir, manifest)
    return manifest


def parse(path: Path) -> Manifest:
    """Read a manifest without looking at the files that it names."""
    manifest = validated(Manifest, read(path))
    for wrong in _contradictions(manifest):
        raise Refused("damaged", message=f"{path}: {wrong}", way_out="run build-engine again")
    return manifest


def lossy(kv_dtype: KvDtype) -> str:
    """What to warn of: pages whose codes have 3 bits; "" for others."""
    if not FORMATS[kv_dtype].loses_much:
        return ""
    return (
        f"--kv-dtype {kv_dtype} keeps keys or values in 3 bits: in vLLM's study such pages cost some 20"
        " points in tests of reasoning; measure your own task, or build with turboquant_4bit_nc or fp8"
    )


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """What no field is wrong about by itself."""
    limits, segments = manifest.limits, manifest.segments
    if limits.page_len % limits.chunk_len:
        yield f"limits.page_len is {limits.page_len}, no multiple of chunk_len {limits.chunk_len}"
    if limits.num_pages > MOST_PAGES:
        yield (
            f"limits.max_rows {limits.max_rows} of limits.max_len {limits.max_len} name {limits.num_pages}"
            f" pages of limits.page_len {limits.page_len}, at most {MOST_PAGES} can be named"
        )
    if len(manifest.rank_files) != (manifest.tp if manifest.tp > 1 else 0):
        yield f"rank_files has {len(manifest.rank_files)} files, tp is {manifest.tp}"
    kinds = {state.dtype for state in manifest.states if state.kind == "page"}
    if kinds and NARROW & kinds != NARROW & _kinds_of(manifest.kv_dtype):
        yield f"pages are {' and '.join(sorted(kinds))}, which kv_dtype {manifest.kv_dtype} has not"
    wanted = ["trunk", "draft"] if manifest.drafts == "mtp" else ["trunk"]
    if sorted(s.name for s in segments) != sorted(wanted):
        yield f"segments are {shown([s.name for s in segments])}, drafts {manifest.drafts} needs {wanted}"
    if manifest.drafts == "mtp":
        needed = (limits.chunk_len + limits.num_drafts + 1, manifest.hidden_size)
        carried = next((state for state in manifest.states if state.name == HIDDEN), None)
        if carried is None or (carried.kind, carried.shape) != ("slot", needed):
            yield f"states has no {HIDDEN} of {list(needed)}, which drafts mtp needs"
        if manifest.draft_vocab is not None and manifest.draft_vocab > manifest.vocab_size:
            yield f"draft_vocab is {manifest.draft_vocab}, vocab_size {manifest.vocab_size}"
    states = Counter(state.name for state in manifest.states)
    yield from (f"states has {name!r} twice" for name, count in states.items() if count > 1)
    for segment in segments:
        for kind in ("weights", "states", "inputs"):
            names = getattr(segment, kind)
            yield from (
                f"segments.{segment.name}.{kind} has {name!r} twice"
                for name, count in Counter(names).items()
                if count > 1
            )
        if bool(segment.pieces) != (manifest.target != "torch"):  # none of a program's checks look at pieces
            has = "pieces" if segment.pieces else "no pieces"
            yield f"segments.{segment.name} has {has}, target is {manifest.target}"
        compiler = segment.compiler.split(" ")
        if segment.pieces and (len(compiler) != 2 or compiler[0] != manifest.target):
            yield f"segments.{segment.name}.compiler is {segment.compiler!r}, target is {manifest.target}"
        if GROUP in segment.weights and manifest.tp == 1:
            yield f"segments.{segment.name}.weights has {GROUP}, but tp is 1"
        lost = [name for name in segment.states if name not in states]
        yield from (f"segments.{segment.name}.states names {name!r}, which states lacks" for name in lost)
    for name in _files_named(manifest):
        if name not in manifest.sha256:
            yield f"it names the file {shown(name)}, of which sha256 says nothing"


def _kinds_of(kv_dtype: KvDtype) -> set[str]:
    return {name_of(dtype) for dtype in FORMATS[kv_dtype].dtypes(torch.float32)}


def _files_named(manifest: Manifest) -> Iterator[str]:
    """Every file that is opened when the engine is."""
    yield manifest.weights_file
    yield from manifest.rank_files
    for segment in manifest.segments:
        yield from segment.files
    for kernels in manifest.kernels:
        yield from (entry.file for entry in kernels.binaries)


def _check_ops(path: Path, manifest: Manifest) -> None:
    here = {name: op.schema() for name, op in OPS.items()}
    other = sorted(name for name, schema in manifest.ops.items() if here.get(name) != schema)
    if other:
        message = f"{path} was built for other forms of the ops {', '.join(other)} than this hemiola has"
        raise Refused("unsupported", message=message, way_out="run build-engine again")
    if any(kernels.sources != sources() for kernels in manifest.kernels):
        message = f"{path} was built from other kernels than this hemiola has"
        raise Refused("unsupported", message=message, way_out="run build-engine again")
