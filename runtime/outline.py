"""What a server must know of an engine before it starts: a part of its manifest. This imports no torch."""

import hashlib
import json
import math
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

import hemiola
from hemiola.runtime.arch import ARCHS, split
from hemiola.runtime.engine_files import check_files, check_regular
from hemiola.runtime.errors import Refused, one_line, shown
from hemiola.runtime.fields import refused_by
from hemiola.runtime.json_file import parse_json, read_text
from hemiola.runtime.options import MOST_STEP_TOKENS, TP_SIZES

FORMAT = 12
FILE = "manifest.json"
MOST_BYTES = 2**24  # of a manifest; one of 100 layers and 7 architectures has some 2**21
MOST_EOS = 1000  # end tokens: each request has a set of them
MOST_LINES = 2**14  # of a program; the memory of a step is planned in the square of them. 100 layers: 4,000
ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int32": 4,
}  # fmt: skip


def _inside(name: str) -> str:
    """A path in an engine's directory, or ""."""
    parts = name.split("/") if name else []
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or not name.isprintable():
        raise ValueError("it should be the name of a file inside the engine directory")
    return name


def _known_archs(names: str) -> str:
    if not split(names) or any(name not in ARCHS for name in split(names)):
        raise ValueError(f"it should be one or more of {', '.join(ARCHS)}")
    return names


def _known_tp(size: int) -> int:
    if size not in TP_SIZES:
        raise ValueError("it should be 1, 2, 4 or 8")
    return size


# What a stranger's manifest can say of a file, a size and a number.
FileName = Annotated[str, AfterValidator(_inside), Field(max_length=1000)]
Word = Annotated[str, Field(pattern=r"^[\w.,:+ -]*$", max_length=200)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=1, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Dtype = Annotated[str, Field(pattern=f"^({'|'.join(ITEM_BYTES)})$")]


class Frozen(BaseModel):
    """Frozen, and unknown keys raise."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(Frozen):
    """Sizes that are compiled into an engine. Lengths are in tokens."""

    max_len: int = Field(gt=0, lt=2**31, description="longest prompt + output of one request")
    max_rows: int = Field(gt=0, le=MOST_STEP_TOKENS, description="requests in one step")
    max_step_tokens: int = Field(gt=0, le=MOST_STEP_TOKENS, description="tokens in one step, over all rows")
    num_drafts: int = Field(ge=0, le=MOST_STEP_TOKENS, description="most drafts of one row in one step (K)")
    page_len: int = Field(
        gt=0, lt=2**31, description="tokens in one page of keys and values; a multiple of chunk_len"
    )
    chunk_len: int = Field(gt=0, lt=2**31, description="tokens between two edges of the recurrence grid (C)")

    @property
    def num_pages(self) -> int:
        """That all rows of a step can name."""
        return self.max_rows * -(-self.max_len // self.page_len)


class State(Frozen):
    """One named tensor that the engine updates in place, per page or per slot."""

    name: Word
    kind: Literal["page", "slot"]
    shape: tuple[Count, ...] = Field(min_length=1, max_length=8)  # of one page or one slot
    dtype: Dtype

    @property
    def num_bytes(self) -> int:
        """Of one page or one slot."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Outline(BaseModel):
    """The fields of a manifest that need no op to be understood; `Manifest` has all."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int
    builder_version: Word
    torch_version: Word
    vocab_size: Size
    arch: Annotated[
        Word, AfterValidator(_known_archs)
    ]  # of runtime/arch.py; several, if parts were compiled for several: sm_89,sm_120
    drafts: Literal["none", "ngram", "mtp"]
    eos_ids: tuple[int, ...] = Field(max_length=MOST_EOS)
    limits: Limits
    tp: Annotated[int, AfterValidator(_known_tp)] = 1  # ranks that run each step together
    states: tuple[State, ...] = Field(max_length=MOST_LINES)
    sha256: dict[FileName, Digest]  # every other file of the engine, by its path inside the directory
    identity: str = ""  # sha256 of the manifest without this field

    @property
    def has_tokenizer(self) -> bool:
        """Else the engine takes and gives token ids."""
        return "tokenizer/tokenizer.json" in self.sha256


Kind = TypeVar("Kind", bound=Outline)


class ManifestFile(NamedTuple):
    """A manifest as it stands in its file."""

    path: Path
    text: str
    content: dict[str, Any]


def load(engine_dir: Path) -> Outline:
    """Read and check the outline, and the files of the engine. What only the ops can check is left to
    `manifest.load`, in the engine's own process. Raises Refused with the reason."""
    stored = read(find(engine_dir))
    outline = validated(Outline, stored)
    check_build(stored.path, outline, seal_of(stored.content))
    check_content(engine_dir, outline)
    return outline


def parse(path: Path) -> Outline:
    """Read the outline without looking at the files of the engine."""
    return validated(Outline, read(path))


def find(engine_dir: Path) -> Path:
    """The manifest of an engine directory."""
    path = engine_dir / FILE
    if not engine_dir.is_dir():
        message = f"{engine_dir} is not a directory"
        way_out = "pass an engine directory made by build-engine"
        raise Refused("not_found", "engine_dir", message=message, way_out=way_out)
    if not path.exists():
        message = f"{engine_dir} has no {FILE}"
        way_out = f"make one with build-engine CHECKPOINT --engine-dir {engine_dir}"
        if (engine_dir / "config.json").exists():
            message = f"{engine_dir} is a checkpoint, not an engine"
            way_out = f"run build-engine {engine_dir} --engine-dir DIR, and pass DIR"
        raise Refused("not_found", "engine_dir", message=message, way_out=way_out)
    return path


def read(path: Path) -> ManifestFile:
    """A JSON object of this format."""
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
        version = f"format {shown(content['format'])}" if "format" in content else "no format"
        message = f"{path} has {version}, hemiola {hemiola.__version__} reads {FORMAT}"
        raise Refused("unsupported", message=message, way_out="run build-engine again")
    return ManifestFile(path, text, content)


def check_content(engine_dir: Path, outline: Outline) -> None:
    """The files of an engine are those of its manifest."""
    try:
        check_files(engine_dir, outline.sha256, FILE)
    except Refused:
        check_same(engine_dir, outline.identity)
        raise


def check_same(engine_dir: Path, identity: str) -> None:
    """A build may have put another engine there while the files of this one were read."""
    if read(find(engine_dir)).content.get("identity") != identity:
        message = f"{engine_dir} became another engine while it was opened"
        raise Refused("in_use", message=message, way_out="open it again")


def validated(kind: type[Kind], stored: ManifestFile) -> Kind:
    """The fields of `kind`, without a look at the files that they name."""
    try:
        return kind.model_validate_json(stored.text, strict=True)
    except ValidationError as error:
        wrong = refused_by(error, stored.content, instead="run build-engine again")
        raise Refused("damaged", wrong.field[:200], message=f"{stored.path}: {one_line(wrong)}") from None


def seal_of(content: Mapping[str, Any]) -> str:
    """The identity that a manifest of this content should carry."""
    sealed = {name: value for name, value in content.items() if name != "identity"}
    try:
        return hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()
    except RecursionError:
        raise Refused(
            "damaged", message=f"{FILE} is nested too deeply", way_out="run build-engine again"
        ) from None


def check_build(path: Path, outline: Outline, seal: str) -> None:
    """Refuses an engine of another version, a manifest that was changed, and ids that are no tokens."""
    if outline.builder_version != hemiola.__version__:
        message = f"{path} was built by hemiola {outline.builder_version}, this is {hemiola.__version__}"
        raise Refused("unsupported", message=message, way_out="run build-engine again")
    versions = (outline.torch_version, metadata.version("torch"))
    built, here = (version.split("+")[0].rsplit(".", 1)[0] for version in versions)
    if built != here:
        message = f"{path} was exported by torch {built}, this is torch {here}"
        raise Refused("unsupported", message=message, way_out="run build-engine again")
    if outline.identity != seal:
        message = f"{path} was changed after the build (its identity does not match)"
        raise Refused("damaged", message=message, way_out="run build-engine again")
    for token_id in outline.eos_ids:
        if not 0 <= token_id < outline.vocab_size:
            message = f"{path}: eos_ids holds {token_id}, the vocabulary is 0..{outline.vocab_size - 1}"
            raise Refused("damaged", "eos_ids", message=message, way_out="run build-engine again")
