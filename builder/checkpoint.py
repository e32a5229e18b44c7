"""A Hugging Face checkpoint folder: typed config reads, tensors that stay on disk until they are needed."""

import math
import re
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from hemiola.builder import formats
from hemiola.builder.formats.declared import MODELOPT, Declared, read_declared
from hemiola.builder.formats.inputs import in_e4m3
from hemiola.builder.formats.module import Module, Stored
from hemiola.builder.lazy import Lazy, stacked
from hemiola.builder.shard import DTYPES as STORED
from hemiola.builder.shard import Shard
from hemiola.runtime import json_file
from hemiola.runtime.errors import Code, Refused, one_line, shown

T = TypeVar("T")
DTYPES = {name: STORED[name] for name in ("BF16", "F16", "F32")}  # of numbers
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
REQUIRED = object()
MOST_SIZE = 2**24  # of anything that a config counts
MAX_LAYERS = MAX_HEADS = MAX_HEAD_DIM = 2**12
MAX_EXPERTS = 2**17  # of all layers: each takes some 20 kB before a weight is read
MAX_JSON = 2**24  # bytes of a JSON file, of which objects take up to fifty times as many
MAX_INDEX = 2**26  # of an index: 400,000 tensors have 40 MB, the largest known 10
MAX_BRACKETS = 2**16  # of an index, which needs three
INFINITIES = ("Infinity", "-Infinity")


class Config:
    """One JSON object of a checkpoint; every read names the key that it refuses."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def read(self, key: str, kind: type[T], default: object = REQUIRED) -> T:
        """The value of `key` as `kind`; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            if default is REQUIRED:
                message = f"{self.where} has no {key}"
                raise Refused("missing", key, message=message, way_out="add it, or use a complete checkpoint")
            return default  # type: ignore[return-value]
        try:
            return TypeAdapter(kind).validate_python(value, strict=True)
        except ValidationError:
            name = getattr(kind, "__name__", str(kind)) if not hasattr(kind, "__args__") else str(kind)
            reason = f"{key} is {shown(value)}, expected {name}"
            raise self.refused("wrong_type", key, reason, "correct it") from None

    def size(self, key: str, default: object = REQUIRED, limit: int = MOST_SIZE) -> int:
        """A positive int."""
        value = self.read(key, int, default)
        if not 0 < value <= limit:
            what = "expected a positive number" if value <= 0 else f"the most that is read is {limit}"
            raise self.refused("out_of_range", key, f"{key} is {shown(value)}, {what}", "correct it")
        return value

    def positive(self, key: str, default: object = REQUIRED) -> float:
        """A positive number that is finite."""
        value = self.read(key, float, default)
        if not 0 < value < math.inf:
            reason = f"{key} is {value}, expected a positive number"
            raise self.refused("out_of_range", key, reason, "correct it")
        return value

    def sizes(self, many: str, few: str) -> tuple[int, int]:
        """Numbers of heads, the first a multiple of the second."""
        a, b = self.size(many, limit=MAX_HEADS), self.size(few, limit=MAX_HEADS)
        if a % b:
            reason = f"{many} {a} is not a multiple of {few} {b}"
            raise self.refused("conflict", many, reason, "correct one of them")
        return a, b

    def require(self, key: str, *accepted: object) -> None:
        """Refuse any value but `accepted`, the first of which is what an absent key means."""
        value = self.values.get(key, accepted[0])
        if not any(type(value) is type(good) and value == good for good in accepted):
            known = " or ".join(repr(good) for good in accepted)
            reason = f"{key} = {shown(value)} is not supported, only {known}"
            raise self.refused("unsupported", key, reason, "use another checkpoint")

    def refused(self, code: Code, key: str, reason: str, way_out: str) -> Refused:
        """The key is the error's field."""
        return Refused(code, key, message=f"{self.where}: {reason}", way_out=way_out)

    def section(self, key: str) -> "Config":
        return Config(self.read(key, dict), f"{self.where}: {key}")

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None


class Tensors(Protocol):
    """Where a checkpoint's tensors come from: its files, or a generator of random numbers."""

    def __contains__(self, name: str) -> bool: ...

    def any(self, prefix: str) -> bool: ...

    def tensor(self, name: str, *shape: int) -> Lazy: ...

    def matrix(self, name: str, *shape: int) -> Lazy: ...

    def leftovers(self) -> Iterable[str]: ...


class Checkpoint:
    """An open folder. What is wrong with names and shapes shows before any content is read."""

    def __init__(
        self,
        path: Path,
        source: "Callable[[Checkpoint], Tensors] | None" = None,
        narrow_inputs: bool = False,
    ) -> None:
        self.path, self.narrow_inputs = path, narrow_inputs  # inputs of layers are e4m3 where it says so
        if not path.is_dir():
            way_out = "pass a Hugging Face checkpoint folder"
            raise Refused("not_found", message=f"{path} is not a directory", way_out=way_out)
        if (config := file_in(path, "config.json")) is None:
            way_out = "pass a Hugging Face checkpoint folder"
            raise Refused("not_found", message=f"{path} has no config.json", way_out=way_out)
        self.config = Config(read_json(config), str(config))
        self._tell_of_code()
        beside = file_in(path, MODELOPT)
        modelopt = read_json(beside) if beside else None
        self.declared = read_declared(self.config.where, self.config.values, modelopt, formats.METHODS)
        self._tensors = (source or Files)(self)

    def _tell_of_code(self) -> None:
        """transformers would load it with trust_remote_code."""
        if "auto_map" in self.config:
            print(
                f"warning: {self.config.where} names code of its own (auto_map); it is not run, hemiola has a"
                " model of its own for each architecture",
                file=sys.stderr,
            )

    @property
    def text_config(self) -> Config:
        """Of the text model, where the checkpoint has others beside it."""
        return self.config.section("text_config") if "text_config" in self.config else self.config

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def any(self, prefix: str) -> bool:
        """Whether some tensor's name starts with `prefix`."""
        return self._tensors.any(prefix)

    def tensor(self, name: str, *shape: int) -> Lazy:
        """The named tensor, which must have this shape."""
        return self._tensors.tensor(name, *shape)

    def matrix(self, name: str, *shape: int) -> Lazy:
        """The named weight of a dense layer or of experts, which may be quantised."""
        return self._tensors.matrix(name, *shape)

    def refuse_leftovers(self, ignorable: str) -> None:
        """Every tensor must have been asked for or match the pattern `ignorable`."""
        left = sorted(name for name in self._tensors.leftovers() if not re.match(ignorable, name))
        scales = [name for name in left if name.rpartition(".")[2] in formats.SUFFIXES - {"weight"}]
        if scales:
            message = f"{self.path} has {scales[0]}, but no layer that may be quantised has this weight"
            raise Refused("unsupported", scales[0], message=message, way_out="use another checkpoint")
        if left:
            names = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            message = f"{self.path} has tensors that {self.architecture} does not know: {names}"
            raise Refused("unsupported", left[0], message=message, way_out="use a checkpoint without them")

    @property
    def architecture(self) -> str:
        names = self.config.read("architectures", list[str])
        if len(names) != 1:
            reason = f"architectures is {shown(names)}, expected one name"
            raise self.config.refused("unsupported", "architectures", reason, "correct it")
        return names[0]

    def token_configs(self, text: Config) -> list[Config]:
        """The configs that name token ids; what the first has counts."""
        path = file_in(self.path, "generation_config.json")
        configs = [Config(read_json(path), str(path))] if path else []
        return [*configs, text, self.config]

    def eos_ids(self, text: Config) -> tuple[int, ...]:
        """Ids that end a text: generation_config.json's if it has some, else the config's."""
        for config in self.token_configs(text):
            if "eos_token_id" in config:
                ids = config.read("eos_token_id", int | list[int])  # type: ignore[arg-type]
                return tuple(ids) if isinstance(ids, list) else (ids,)
        return ()


class Files:
    """The safetensors files of a folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = path = checkpoint.path
        self._places = _read_index(path)
        self._shards = {name: Shard(_shard(path, name)) for name in self._shard_names()}
        self._files = self._locate()
        self._declared = checkpoint.declared or Declared(checkpoint.config.where)
        self._narrow_inputs = checkpoint.narrow_inputs
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def any(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._files)

    def tensor(self, name: str, *shape: int) -> Lazy:
        if name not in self._files:
            way_out = "the checkpoint is incomplete, download it again"
            raise Refused("missing", name, message=f"{self.path} has no tensor {name}", way_out=way_out)
        stored = self._shards[self._files[name]].stored(name)
        stored_shape, dtype = stored.shape, stored.dtype
        if stored_shape != shape and (shape or stored_shape != (1,)):  # one number may be a list of one
            message = (
                f"{stored.where}: {name} has shape {list(stored_shape)}, config.json asks for {list(shape)}"
            )
            raise Refused("conflict", name, message=message, way_out="correct one of them")
        if dtype not in DTYPES:
            message = (
                f"{stored.where}: {name} is {dtype}, not one of {', '.join(DTYPES)}; only weights of"
                " dense layers and experts may be quantised"
            )
            raise Refused("unsupported", name, message=message, way_out="use another checkpoint")
        self._used.add(name)
        return Lazy(stored_shape, DTYPES[dtype], stored.finite)

    def matrix(self, name: str, *shape: int) -> Lazy:
        module = self._module(name, shape)
        if formats.is_plain(module):
            weight = module.tensors.get("weight")
            return self.tensor(weight.name if weight else name, *shape)
        self._used.update(stored.name for stored in module.tensors.values())
        return stacked(map(self._matrix, module.matrices())) if len(shape) == 3 else self._matrix(module)

    def _matrix(self, module: Module) -> Lazy:
        """One that is quantised."""
        group = formats.find(module, self._declared)
        if self._narrow_inputs:
            group = in_e4m3(module, self._declared, group)
        return Lazy.quantised(module.shape, group)

    def _module(self, name: str, shape: tuple[int, ...]) -> Module:
        """What there is of a weight: X.weight and what stands beside it."""
        stem, is_stack = name.removesuffix(".weight"), len(shape) == 3
        tensors: dict[str, Stored] = {}
        for end in sorted(formats.SUFFIXES):  # errors name the first
            spellings = _stack_spellings(stem, end) if is_stack else (f"{stem}.{end}",)
            known = [spelling for spelling in spellings if spelling in self._files]
            if known:
                tensors[end] = self._shards[self._files[known[0]]].stored(known[0])
        return Module(stem, shape, tensors, joined=2 if is_stack and stem.endswith("gate_up_proj") else 1)

    def leftovers(self) -> Iterable[str]:
        return self._files.keys() - self._used

    def _shard_names(self) -> list[str]:
        names = shard_names(self.path)
        if names == [SINGLE] and file_in(self.path, SINGLE) is None:
            message = f"{self.path} has no {SINGLE} and no index of shards"
            way_out = "fetch the weights, or convert them to safetensors"
            raise Refused("not_found", message=message, way_out=way_out)
        return names

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name."""
        stored = {name: file for file, shard in self._shards.items() for name in shard.names}
        for name, file in self._places.items():
            if stored.get(name) != file:
                message = f"{self.path / INDEX} says that {name} is in {file}, but it is not"
                raise Refused("damaged", name, message=message, way_out="download the checkpoint again")
        return stored


def _stack_spellings(stem: str, end: str) -> tuple[str, ...]:
    """Of a tensor of stacked experts X: X and X_scale_inv (transformers), X_weight_scale (ModelOpt), X_packed
    and X.weight_packed (compressed-tensors)."""
    if end == "weight":
        return stem, f"{stem}.weight"
    short = end.removeprefix("weight_")
    return f"{stem}.{end}", f"{stem}_{end if short in formats.SUFFIXES else short}", f"{stem}_{end}"


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, where an index says so."""
    index = file_in(folder, INDEX)
    return Config(read_json(index), str(index)).read("weight_map", dict[str, str]) if index else {}


def shard_names(folder: Path) -> list[str]:
    """Files that should have a checkpoint's weights, each one of the folder's by its name."""
    names = sorted(set(_read_index(folder).values())) if file_in(folder, INDEX) else [SINGLE]
    for name in names:
        if name in ("", "..") or name != Path(name).name or not name.isprintable():
            message = f"{folder / INDEX} names the file {name!r}, which is none of the folder's"
            raise Refused("damaged", message=message, way_out="download it again")
    return names


def file_in(folder: Path, name: str) -> Path | None:
    """A checkpoint's file, or None. Raises Refused for what is no regular file, and for a link: it could lead
    to any file of the user's. But a cache of the Hub's links to blobs of its own."""
    path = folder / name
    try:
        kind = path.lstat().st_mode
        if stat.S_ISLNK(kind):
            if not _is_blob(folder.resolve(), path.resolve(strict=True)):
                message = f"{path} is a link to {path.readlink()}"
                raise Refused("unsupported", message=message, way_out="put the file itself into the folder")
            kind = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            message = f"{path} is a link to nothing"
            raise Refused("not_found", message=message, way_out="download it again") from None
        return None
    except Refused:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # links in a circle, a name with a NUL
        message = f"{folder}: {name!r} cannot be opened ({one_line(error)})"
        raise Refused("failed", message=message, way_out="download it again") from None
    if not stat.S_ISREG(kind):
        message = f"{path} is no regular file"
        raise Refused("unsupported", message=message, way_out="put the file itself into the folder")
    return path


def _is_blob(folder: Path, target: Path) -> bool:
    """CACHE/models--NAME/snapshots/REVISION/... links to CACHE/models--NAME/blobs/SHA, or by way of it to
    CACHE/blobs/AB/ABCD..., which all models share."""
    snapshots = (place for place in (folder, *folder.parents) if place.parent.name == "snapshots")
    repos = (place.parent.parent for place in snapshots)
    return any(target.parent == repo / "blobs" or _is_shared(repo.parent, target) for repo in repos)


def _is_shared(cache: Path, target: Path) -> bool:
    name = target.name
    return bool(re.fullmatch("[0-9a-f]{64}", name)) and target == cache / "blobs" / name[:2] / name


def _shard(folder: Path, name: str) -> Path:
    """A file that an index names."""
    if (path := file_in(folder, name)) is None:
        message = f"{folder / name} is missing, {INDEX} names it"
        raise Refused("not_found", message=message, way_out="download it again")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, with infinities as floats."""
    most_bytes, most_brackets = (MAX_INDEX, MAX_BRACKETS) if path.name == INDEX else (MAX_JSON, None)
    content = json_file.read_json(path, "download it again", most_bytes, most_brackets=most_brackets)
    if not isinstance(content, dict):
        raise Refused("damaged", message=f"{path} is not a JSON object", way_out="download it again")
    try:
        return {key: _with_floats(value) for key, value in content.items()}
    except RecursionError:
        message = f"{path} cannot be read as JSON (nested too deeply)"
        raise Refused("malformed", message=message, way_out="download it again") from None


def _with_floats(value: Any) -> Any:
    """transformers writes infinity as {"__float__": "Infinity"}; json itself reads a bare Infinity."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in INFINITIES:
            return float(value["__float__"])
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return float(value) if value in INFINITIES else value
