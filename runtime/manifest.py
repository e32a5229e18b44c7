"""The contract between builder and runtime: `manifest.json`, which says what an engine is."""

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import hemiola
from hemiola.plugins import OPS
from hemiola.plugins.gpu.binaries import Binary, sources
from hemiola.runtime.api import reason, shown
from hemiola.runtime.errors import Refused
from hemiola.runtime.json_file import read_json

FORMAT = 8
FILE = "manifest.json"
PARTS = "parts"  # the folder of compiled parts
NEXT = ".next"  # behind a state's name: what it is after the step
PTX = "ptx"  # the form of an op whose kernels TensorRT has in its own engine
Target = Literal["torch", "onnxruntime", "tensorrt-rtx", "tensorrt"]


class Frozen(BaseModel):
    """Frozen, and unknown keys raise."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(Frozen):
    """Sizes that are compiled into an engine. Lengths are in tokens."""

    max_len: int = Field(gt=0, description="longest prompt + output of one request")
    max_rows: int = Field(gt=0, description="requests in one step")
    max_step_tokens: int = Field(gt=0, description="tokens in one step, over all rows")
    num_drafts: int = Field(ge=0, description="most drafts of one row in one step (K)")
    page_len: int = Field(gt=0, description="tokens in one page of keys and values; a multiple of chunk_len")
    chunk_len: int = Field(gt=0, description="tokens between two edges of the recurrence grid (C)")


class State(Frozen):
    """One named tensor that the engine updates in place, per page or per slot."""

    name: str
    kind: Literal["page", "slot"]
    shape: tuple[int, ...]  # of one page or one slot
    dtype: str


class Drawn(Frozen):
    """A weight of normal numbers around 0 that is made when the engine is opened, to measure it."""

    shape: tuple[int, ...]
    dtype: str
    std: float


class OpNode(Frozen):
    """One call of an op of ours, in the order of the program."""

    op: str
    form: str
    refused: dict[str, str]  # by better form, why it is not that
    sizes: tuple[int, ...]  # that the form gets behind the op's arguments

    @property
    def is_callback(self) -> bool:
        """TensorRT calls it in Python; why it cannot launch it by itself, stands in `refused`."""
        return PTX in self.refused


class SegmentPiece(Frozen):
    """One step of a segment that was cut. Values are named; each is computed once."""

    kind: Literal["part", "view", "op"]
    name: str  # of the file in parts/, of torch's view, or of the op, whose node is the next of the segment's
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: tuple[int | float | str | bool, ...] = ()  # sizes of a view, attributes of an op


class Profile(Frozen):
    """Sizes that compiled parts take: by name the least, the usual and the most."""

    name: str
    sizes: dict[str, tuple[int, int, int]]


class Segment(Frozen):
    """One exported program. It is called with its weights, states and inputs, in this order, flat."""

    name: Literal["trunk", "draft"]
    file: str  # "" where it is in pieces
    weights: tuple[str, ...]
    states: tuple[str, ...]
    inputs: tuple[str, ...]
    nodes: tuple[OpNode, ...]
    pieces: tuple[SegmentPiece, ...] = ()  # in the order in which they run
    outputs: tuple[str, ...] = ()  # logits and hidden among the values of the pieces
    compiler: str = ""  # of the parts: the target and its version
    profiles: tuple[Profile, ...] = ()  # of the parts, the one for the fewest tokens first
    work_bytes: int = 0  # that its largest step takes on a GPU, beside weights, pages and slots

    @property
    def files(self) -> list[str]:
        """What the segment consists of, inside the engine directory; segments may share parts."""
        parts = dict.fromkeys(f"{PARTS}/{piece.name}" for piece in self.pieces if piece.kind == "part")
        return [*parts] or [self.file]


class KernelFile(Frozen):
    """One compiled kernel."""

    file: str
    binary: Binary


class Kernels(Frozen):
    """All kernels that an engine can come to launch on GPUs of one architecture."""

    arch: str
    cuda: str  # version of the assembler: a driver must know its major
    sources: str  # plugins/gpu/binaries.py
    binaries: tuple[KernelFile, ...]


class Manifest(Frozen):
    """Everything the runtime knows of an engine."""

    format: int
    builder_version: str
    torch_version: str
    architecture: str
    layers: tuple[str, ...]  # one word each: mamba2, attention, mlp, moe, delta
    vocab_size: int
    hidden_size: int
    target: Target
    promise: Literal["bits", "tokens"]  # what every run has in common with the plain run
    arch: str  # of runtime/arch.py; several, if parts were compiled for several: sm_89,sm_120
    drafts: Literal["none", "ngram", "mtp"]
    draft_vocab: int | None = None  # an MTP head has logits of so many of the lowest ids; None: of all
    eos_ids: tuple[int, ...]
    limits: Limits
    weights_file: str
    drawn: dict[str, Drawn]  # weights that are random numbers and stand in no file, by name
    states: tuple[State, ...]
    segments: tuple[Segment, ...]
    kernels: tuple[Kernels, ...]  # one for each architecture of a GPU
    ops: dict[str, str]  # schemas of the ops that the segments call, by name
    sha256: dict[str, str]  # every other file of the engine, by its path inside the directory
    identity: str = ""  # sha256 of this manifest without this field

    def seal(self) -> str:
        """The identity this manifest should carry."""
        content = json.dumps(self.model_dump(mode="json", exclude={"identity"}), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def write(self, engine_dir: Path) -> "Manifest":
        """Seal and store; returns the sealed manifest. Written last, so no broken build leaves one."""
        sealed = self.model_copy(update={"identity": self.seal()})
        text = json.dumps(sealed.model_dump(mode="json"), indent=1)
        (engine_dir / FILE).write_text(text + "\n")
        return sealed

    @property
    def has_tokenizer(self) -> bool:
        """Else the engine takes and gives token ids."""
        return "tokenizer/tokenizer.json" in self.sha256

    @property
    def drawn_bytes(self) -> int:
        """Memory of the weights that stand in no file."""
        sizes = (math.prod(d.shape) * getattr(torch, d.dtype).itemsize for d in self.drawn.values())
        return sum(sizes)

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
    path = engine_dir / FILE
    if not engine_dir.is_dir():
        raise Refused(f"{engine_dir} is not a directory; pass an engine directory made by build-engine")
    if not path.exists():
        raise Refused(
            f"{engine_dir} has no {FILE}; make one with build-engine CHECKPOINT --engine-dir {engine_dir}"
        )
    manifest = parse(path)
    _check_versions(path, manifest)
    if manifest.identity != manifest.seal():
        raise Refused(
            f"{path} was changed after the build (its identity does not match); run build-engine again"
        )
    _check_eos(path, manifest)
    _check_ops(path, manifest)
    for name, expected in manifest.sha256.items():
        _check_file(engine_dir / name, expected)
    _check_strays(engine_dir, manifest)
    return manifest


def parse(path: Path) -> Manifest:
    """Read a manifest without looking at the files that it names."""
    _check_regular(path)
    content = read_json(path, "run build-engine again")
    if not isinstance(content, dict):
        raise Refused(f"{path} is no JSON object; run build-engine again")
    if content.get("format") != FORMAT:
        found = f"format {shown(content['format'])}" if "format" in content else "no format"
        raise Refused(
            f"{path} has {found}, hemiola {hemiola.__version__} reads {FORMAT}; run build-engine again"
        )
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        missing = first["type"] == "missing"
        wrong = "is missing" if missing else f"is {shown(first['input'])}: {reason(first)}"
        raise Refused(f"{path}: {where} {wrong}; run build-engine again") from None


def _check_versions(path: Path, manifest: Manifest) -> None:
    if manifest.builder_version != hemiola.__version__:
        raise Refused(
            f"{path} was built by hemiola {manifest.builder_version}, this is {hemiola.__version__};"
            f" run build-engine again"
        )
    built, here = (v.split("+")[0].rsplit(".", 1)[0] for v in (manifest.torch_version, torch.__version__))
    if built != here:
        raise Refused(f"{path} was exported by torch {built}, this is torch {here}; run build-engine again")


def _check_eos(path: Path, manifest: Manifest) -> None:
    for token_id in manifest.eos_ids:
        if not 0 <= token_id < manifest.vocab_size:
            raise Refused(
                f"{path}: eos_ids holds {token_id}, the vocabulary is 0..{manifest.vocab_size - 1};"
                f" run build-engine again"
            )


def _check_ops(path: Path, manifest: Manifest) -> None:
    here = {name: op.schema() for name, op in OPS.items()}
    other = sorted(name for name, schema in manifest.ops.items() if here.get(name) != schema)
    if other:
        raise Refused(
            f"{path} was built for other forms of the ops {', '.join(other)} than this hemiola has;"
            f" run build-engine again"
        )
    if any(kernels.sources != sources() for kernels in manifest.kernels):
        raise Refused(f"{path} was built from other kernels than this hemiola has; run build-engine again")


def _check_regular(path: Path) -> None:
    if not path.is_file():
        wrong = "no regular file" if path.exists() else "missing"
        raise Refused(f"{path} is {wrong}; run build-engine again")


def _check_file(path: Path, expected: str) -> None:
    _check_regular(path)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise Refused(
            f"{path} was changed after the build (sha256 {found[:12]}, expected {expected[:12]});"
            f" run build-engine again"
        )


def _check_strays(engine_dir: Path, manifest: Manifest) -> None:
    """Beside a tokenizer's files another one, such as a chat template, would be read."""
    folders = {Path(name).parent for name in manifest.sha256} - {Path()}
    for name in strays(engine_dir, manifest.sha256):
        if Path(name).parent in folders:
            raise Refused(
                f"{engine_dir / name} was not there when the engine was built; remove it, or run build-engine"
                " again"
            )


def strays(engine_dir: Path, own: Iterable[str]) -> list[str]:
    """Files in an engine's directory that are not its own."""
    files = {str(path.relative_to(engine_dir)) for path in engine_dir.rglob("*") if path.is_file()}
    return sorted(files - {FILE, *own})
