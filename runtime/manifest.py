"""The contract between builder and runtime: `manifest.json`, which says what an engine is."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
)

import hemiola
from hemiola.plugins import OPS
from hemiola.plugins.attention.pages import FORMATS
from hemiola.plugins.gpu.binaries import sources
from hemiola.plugins.ranks import SIZES
from hemiola.runtime.arch import ARCHS, name_of, split
from hemiola.runtime.engine_files import check_files, check_regular
from hemiola.runtime.errors import Refused, one_line, shown
from hemiola.runtime.fields import refused_by
from hemiola.runtime.json_file import parse_json, read_text
from hemiola.runtime.manifest_parts import (
    GROUP,
    HIDDEN,
    PTX,
    Digest,
    Drawn,
    FileName,
    Frozen,
    Kernels,
    Limits,
    Line,
    RepoName,
    Segment,
    Size,
    State,
    Word,
)
from hemiola.runtime.options import KvDtype

FORMAT = 12
FILE = "manifest.json"
NARROW = {"float8_e4m3fn", "uint8"}  # dtypes of pages alone
Target = Literal["torch", "onnxruntime", "tensorrt-rtx", "tensorrt"]
MOST_BYTES = 2**24  # of a manifest; one of 100 layers and 7 architectures has some 2**21
MOST_EOS = 1000  # end tokens: each request has a set of them
MOST_PAGES = 2**24  # that all rows of a step can name, and so the entries of a table on the host


def _known_archs(names: str) -> str:
    if not split(names) or any(name not in ARCHS for name in split(names)):
        raise ValueError(f"it should be one or more of {', '.join(ARCHS)}")
    return names


def _known_tp(size: int) -> int:
    if size not in SIZES:
        raise ValueError("it should be 1, 2, 4 or 8")
    return size


class Manifest(Frozen):
    """Everything the runtime knows of an engine."""

    format: int
    builder_version: Word
    torch_version: Word
    repo: RepoName = ""  # the checkpoint's name on the Hub, if it came from there
    commit: Word = ""  # of the checkpoint there
    architecture: Word
    layers: tuple[Word, ...]  # one word each: mamba2, attention, mlp, moe, delta
    vocab_size: Size
    hidden_size: Size
    target: Target
    promise: Literal["bits", "tokens"]  # what every run has in common with the plain run
    arch: Annotated[
        Word, AfterValidator(_known_archs)
    ]  # of runtime/arch.py; several, if parts were compiled for several: sm_89,sm_120
    drafts: Literal["none", "ngram", "mtp"]
    draft_vocab: Size | None = None  # an MTP head has logits of so many of the lowest ids; None: of all
    draft_head: Literal["fp8", "int4"] | None = (
        None  # the codes of the head that it reads; None: the trunk's head
    )
    kv_dtype: KvDtype  # what pages hold
    act_dtype: Word  # of inputs of FP8 layers: fp8, or what the engine computes in (builder/options.py)
    eos_ids: tuple[int, ...] = Field(max_length=MOST_EOS)
    limits: Limits
    tp: Annotated[int, AfterValidator(_known_tp)] = 1  # ranks that run each step together
    sum_segments: Literal[1, 8] = 1  # of what ranks add; 8: bits do not depend on tp
    weights_file: FileName
    rank_files: tuple[FileName, ...] = ()  # of each rank, with its parts of weights that are cut
    drawn: dict[Word, Drawn]  # weights that are random numbers and stand in no file, by name
    states: tuple[State, ...]
    segments: tuple[Segment, ...]
    kernels: tuple[Kernels, ...]  # one for each architecture of a GPU
    ops: dict[Word, Line]  # schemas of the ops that the segments call, by name
    sha256: dict[FileName, Digest]  # every other file of the engine, by its path inside the directory
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
    path = engine_dir / FILE
    if not engine_dir.is_dir():
        message = f"{engine_dir} is not a directory"
        way_out = "pass an engine directory made by build-engine"
        raise Refused("not_found", "engine_dir", message=message, way_out=way_out)
    if not path.exists():
        message = f"{engine_dir} has no {FILE}"
        way_out = f"make one with build-engine CHECKPOINT --engine-dir {engine_dir}"
        raise Refused("not_found", "engine_dir", message=message, way_out=way_out)
    manifest = parse(path)
    _check_versions(path, manifest)
    if manifest.identity != manifest.seal():
        message = f"{path} was changed after the build (its identity does not match)"
        raise Refused("damaged", message=message, way_out="run build-engine again")
    _check_eos(path, manifest)
    _check_ops(path, manifest)
    check_files(engine_dir, manifest.sha256, FILE)
    return manifest


def parse(path: Path) -> Manifest:
    """Read a manifest without looking at the files that it names."""
    check_regular(path)
    text = read_text(path, "run build-engine again", MOST_BYTES)
    try:
        content = parse_json(text, unique=True)
    except ValueError as error:
        message = f"{path} cannot be read as JSON ({one_line(error)})"
        raise Refused("damaged", message=message, way_out="run build-engine again") from None
    if not isinstance(content, dict):
        raise Refused("damaged", message=f"{path} is no JSON object", way_out="run build-engine again")
    if content.get("format") != FORMAT:
        found = f"format {shown(content['format'])}" if "format" in content else "no format"
        message = f"{path} has {found}, hemiola {hemiola.__version__} reads {FORMAT}"
        raise Refused("unsupported", message=message, way_out="run build-engine again")
    try:
        manifest = Manifest.model_validate_json(text, strict=True)
    except ValidationError as error:
        wrong = refused_by(error, content, instead="run build-engine again")
        raise Refused("damaged", wrong.field[:200], message=f"{path}: {one_line(wrong)}") from None
    for wrong in _contradictions(manifest):
        raise Refused("damaged", message=f"{path}: {wrong}", way_out="run build-engine again")
    return manifest


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


def _check_versions(path: Path, manifest: Manifest) -> None:
    if manifest.builder_version != hemiola.__version__:
        message = f"{path} was built by hemiola {manifest.builder_version}, this is {hemiola.__version__}"
        raise Refused("unsupported", message=message, way_out="run build-engine again")
    built, here = (v.split("+")[0].rsplit(".", 1)[0] for v in (manifest.torch_version, torch.__version__))
    if built != here:
        message = f"{path} was exported by torch {built}, this is torch {here}"
        raise Refused("unsupported", message=message, way_out="run build-engine again")


def _check_eos(path: Path, manifest: Manifest) -> None:
    for token_id in manifest.eos_ids:
        if not 0 <= token_id < manifest.vocab_size:
            message = f"{path}: eos_ids holds {token_id}, the vocabulary is 0..{manifest.vocab_size - 1}"
            raise Refused("damaged", "eos_ids", message=message, way_out="run build-engine again")


def _check_ops(path: Path, manifest: Manifest) -> None:
    here = {name: op.schema() for name, op in OPS.items()}
    other = sorted(name for name, schema in manifest.ops.items() if here.get(name) != schema)
    if other:
        message = f"{path} was built for other forms of the ops {', '.join(other)} than this hemiola has"
        raise Refused("unsupported", message=message, way_out="run build-engine again")
    if any(kernels.sources != sources() for kernels in manifest.kernels):
        message = f"{path} was built from other kernels than this hemiola has"
        raise Refused("unsupported", message=message, way_out="run build-engine again")
