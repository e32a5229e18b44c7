"""A Hugging Face checkpoint folder: typed config reads, tensors that stay on disk until they are needed."""

import re
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from hemiola.builder import formats
from hemiola.builder.formats.declared import MODELOPT, Declared, read_declared
from hemiola.builder.formats.module import Module, Stored
from hemiola.builder.lazy import Lazy
from hemiola.runtime import json_file
from hemiola.runtime.errors import Refused, one_line

T = TypeVar("T")
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # of numbers
INDEX = "model.safetensors.index.json"
REQUIRED = object()


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
                raise Refused(f"{self.where} has no {key}; add it, or use a complete checkpoint")
            return default  # type: ignore[return-value]
        try:
            return TypeAdapter(kind).validate_python(value, strict=True)
        except ValidationError:
            name = getattr(kind, "__name__", str(kind)) if not hasattr(kind, "__args__") else str(kind)
            raise self.refused(f"{key} is {value!r}, expected {name}; correct it") from None

    def size(self, key: str, default: object = REQUIRED) -> int:
        """A positive int."""
        value = self.read(key, int, default)
        if value <= 0:
            raise self.refused(f"{key} is {value}, expected a positive number; correct it")
        return value

    def sizes(self, many: str, few: str) -> tuple[int, int]:
        """Two positive ints, the first a multiple of the second."""
        a, b = self.size(many), self.size(few)
        if a % b:
            raise self.refused(f"{many} {a} is not a multiple of {few} {b}; correct one of them")
        return a, b

    def require(self, key: str, *accepted: object) -> None:
        """Refuse any value but `accepted`, the first of which is what an absent key means."""
        value = self.values.get(key, accepted[0])
        if not any(type(value) is type(good) and value == good for good in accepted):
            known = " or ".join(repr(good) for good in accepted)
            raise self.refused(f"{key} = {value!r} is not supported, only {known}; use another checkpoint")

    def refused(self, reason: str) -> Refused:
        return Refused(f"{self.where}: {reason}")

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
    ) -> None:
        self.path = path
        if not path.is_dir():
            raise Refused(f"{path} is not a directory; pass a Hugging Face checkpoint folder")
        if (config := file_in(path, "config.json")) is None:
            raise Refused(f"{path} has no config.json; pass a Hugging Face checkpoint folder")
        self.config = Config(read_json(config), str(config))
        self._tell_of_code()
        beside = file_in(path, MODELOPT)
        modelopt = read_json(beside) if beside else None
        self.declared = read_declared(self.config.where, self.config.values, modelopt)
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
            raise Refused(
                f"{self.path} has {scales[0]}, but no layer that may be quantised has this weight;"
                " use another checkpoint"
            )
        if left:
            names = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            raise Refused(
                f"{self.path} has tensors that {self.architecture} does not know: {names}; "
                "use a checkpoint without them"
            )

    @property
    def architecture(self) -> str:
        names = self.config.read("architectures", list[str])
        if len(names) != 1:
            raise Refused(f"{self.config.where}: architectures is {names}, expected one name; correct it")
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
        self._places = self._read_index()
        self._shards = {name: _open(_shard(path, name)) for name in self._shard_names()}
        self._files = self._locate()
        self._declared = checkpoint.declared or Declared(checkpoint.config.where)
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def any(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._files)

    def tensor(self, name: str, *shape: int) -> Lazy:
        if name not in self._files:
            raise Refused(
                f"{self.path} has no tensor {name}; the checkpoint is incomplete, download it again"
            )
        file = self._files[name]
        header = self._shards[file].get_slice(name)
        found, dtype = tuple(header.get_shape()), header.get_dtype()
        if found != shape and (shape or found != (1,)):  # one number may be a list of one
            raise Refused(
                f"{self.path / file}: {name} has shape {list(found)}, config.json asks for {list(shape)}; "
                "correct one of them"
            )
        if dtype not in DTYPES:
            raise Refused(
                f"{self.path / file}: {name} is {dtype}, not one of {', '.join(DTYPES)}; only weights of"
                " dense layers and experts may be quantised; use another checkpoint"
            )
        self._used.add(name)
        return Lazy(found, DTYPES[dtype], lambda: self._read(file, name))

    def matrix(self, name: str, *shape: int) -> Lazy:
        module = self._module(name, shape)
        found = formats.find(module, self._declared) if module.tensors else None
        if found is None:
            return self.tensor(name, *shape)
        self._used.update(stored.name for stored in module.tensors.values())
        return Lazy.quantised(shape, found)

    def _module(self, name: str, shape: tuple[int, ...]) -> Module:
        """What there is of a weight: X.weight and what stands beside it. Stacked experts have no such end."""
        stem = name.removesuffix(".weight")
        names = {suffix: f"{stem}.{suffix}" for suffix in formats.SUFFIXES}
        if stem == name:
            names = {"weight": name, "weight_scale_inv": f"{name}_scale_inv"}
        return Module(stem, shape, {key: self._stored(n) for key, n in names.items() if n in self._files})

    def _stored(self, name: str) -> Stored:
        file = self._files[name]
        header = self._shards[file].get_slice(name)

        def read() -> torch.Tensor:
            return self._content(file, name)

        where = str(self.path / file)
        return Stored(name, where, header.get_dtype(), tuple(header.get_shape()), read)

    def leftovers(self) -> Iterable[str]:
        return self._files.keys() - self._used

    def _read_index(self) -> dict[str, str]:
        """Tensor name -> file name, where an index says so."""
        index = file_in(self.path, INDEX)
        return Config(read_json(index), str(index)).read("weight_map", dict[str, str]) if index else {}

    def _shard_names(self) -> list[str]:
        if file_in(self.path, INDEX):
            return sorted(set(self._places.values()))
        if file_in(self.path, "model.safetensors"):
            return ["model.safetensors"]
        raise Refused(
            f"{self.path} has no model.safetensors and no index of shards; convert the weights to safetensors"
        )

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name."""
        stored = {name: file for file, shard in self._shards.items() for name in shard.keys()}  # noqa: SIM118
        for name, file in self._places.items():
            if stored.get(name) != file:
                raise Refused(
                    f"{self.path / INDEX} says that {name} is in {file}, but it is not; download the"
                    " checkpoint again"
                )
        return stored

    def _content(self, file: str, name: str) -> torch.Tensor:
        try:
            return self._shards[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise Refused(
                f"{self.path / file}: cannot read {name} ({one_line(error)}); download it again"
            ) from None

    def _read(self, file: str, name: str) -> torch.Tensor:
        tensor = self._content(file, name)
        num_finite = int(tensor.isfinite().sum())
        if num_finite < tensor.numel():
            raise Refused(
                f"{self.path / file}: {name} holds NaN or infinity ({tensor.numel() - num_finite} of"
                f" {tensor.numel()} values); download it again or use another checkpoint"
            )
        return tensor


def _open(path: Path) -> Any:
    if not path.is_file():
        raise Refused(f"{path} is missing, but {INDEX} names it; download it")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise Refused(
            f"{path} is not a complete safetensors file ({one_line(error)}); download it again"
        ) from None


def file_in(folder: Path, name: str) -> Path | None:
    """A checkpoint's file, or None. Raises Refused for what is no regular file, and for a link: it could lead
    to any file of the user's. But a cache of the Hub's links to blobs of its own."""
    path = folder / name
    try:
        kind = path.lstat().st_mode
        if stat.S_ISLNK(kind):
            if not _is_blob(folder.resolve(), path.resolve(strict=True)):
                raise Refused(f"{path} is a link to {path.readlink()}; put the file itself into the folder")
            kind = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise Refused(f"{path} is a link to nothing; download it again") from None
        return None
    except Refused:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # links in a circle, a name with a NUL
        raise Refused(f"{folder}: {name!r} cannot be opened ({one_line(error)}); download it again") from None
    if not stat.S_ISREG(kind):
        raise Refused(f"{path} is no regular file; put the file itself into the folder")
    return path


def _is_blob(folder: Path, target: Path) -> bool:
    """models--NAME/snapshots/REVISION/... links to models--NAME/blobs/SHA."""
    snapshots = (place for place in (folder, *folder.parents) if place.parent.name == "snapshots")
    return any(target.parent == place.parent.parent / "blobs" for place in snapshots)


def _shard(folder: Path, name: str) -> Path:
    """A file that an index names."""
    if name in ("", "..") or name != Path(name).name or not name.isprintable():
        raise Refused(
            f"{folder / INDEX} names the file {name!r}, which is none of the folder's; download it again"
        )
    if (path := file_in(folder, name)) is None:
        raise Refused(f"{folder / name} is missing, {INDEX} names it; download it again")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, with infinities as floats."""
    content = json_file.read_json(path, "download it again")
    if not isinstance(content, dict):
        raise Refused(f"{path} is not a JSON object; download it again")
    try:
        return _with_floats(content)
    except RecursionError:
        raise Refused(f"{path} cannot be read as JSON (nested too deeply); download it again") from None


def _with_floats(value: Any) -> Any:
    """transformers writes infinity as {"__float__": "Infinity"}; json itself reads a bare Infinity."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return float(value) if value in ("Infinity", "-Infinity") else value
