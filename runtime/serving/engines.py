"""The engines of a server: their names, their own settings, and what is refused before one is started."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hemiola.runtime.arch import ARCHS, split
from hemiola.runtime.config import ENDLESS, ServeConfig, resolve
from hemiola.runtime.errors import Refused, counted, in_python, shown, within
from hemiola.runtime.json_file import read_json
from hemiola.runtime.outline import Outline
from hemiola.runtime.serving import settings


def name_engines(engine_dirs: Sequence[Path], names: Sequence[str]) -> dict[str, Path]:
    """Pairs engines with --model-name, in order; a single engine is called hemiola."""
    if not names and len(engine_dirs) == 1:
        names = ["hemiola"]
    if len(names) != len(engine_dirs):
        message = f"{counted(len(engine_dirs), 'engine', 'engines')}, but {len(names)} --model-name"
        raise Refused("conflict", "model_name", message=message, way_out="give each engine a name")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", name):
            message = f"model name {shown(name)} cannot be a path in a URL"
            way_out = "use at most 200 letters, digits, '_', '-' and '.'"
            raise Refused("malformed", "model_name", message=message, way_out=way_out)
    if len(set(names)) != len(names):
        message = f"model names {', '.join(names)} are not all different"
        raise Refused("conflict", "model_name", message=message, way_out="give each engine its own")
    return dict(zip(names, engine_dirs, strict=True))


def read_models(
    file: Path | None, engine_dirs: Sequence[Path], names: Sequence[str]
) -> tuple[dict[str, Path], dict[str, dict[str, Any]]]:
    """Engines by model name, and each one's own settings, from a file or from the command line."""
    if file is None:
        if not engine_dirs:
            message = "no engine is given"
            raise Refused("missing", "engine_dir", message=message, way_out="pass its folder, or --models")
        return name_engines(engine_dirs, names), {}
    if engine_dirs or names:
        message, way_out = "--models names the engines", "leave other engines and --model-name out"
        raise Refused("conflict", "models", message=message, way_out=way_out)
    models = _read_json(file)
    if not (isinstance(models, dict) and models) or not all(
        isinstance(model_settings, dict) and "engine_dir" in model_settings
        for model_settings in models.values()
    ):
        message = f'{file} must be like {{"model name": {{"engine_dir": "...", "max_rows": 8}}}}'
        raise Refused("malformed", "models", message=message, way_out="correct it")
    for name, model_settings in models.items():
        with within(f"{file}: {name}", in_python):
            settings.split(model_settings)
    paths = [file.parent / model_settings["engine_dir"] for model_settings in models.values()]
    for model_settings in models.values():
        if model_settings.get("disk_cache_dir"):
            model_settings["disk_cache_dir"] = str(file.parent / model_settings["disk_cache_dir"])
    return name_engines(paths, list(models)), models


def _read_json(file: Path) -> Any:
    try:
        return read_json(file, "correct it", unique=True)
    except OSError as error:
        message = f"--models {file} cannot be read ({error.strerror})"
        raise Refused("not_found", "models", message=message, way_out="pass another file") from None


def check_sizes(values: Mapping[str, Any], engine: Outline) -> None:
    """What the model would refuse when it is loaded, whatever memory is free then."""
    if split(engine.arch)[0] in ARCHS:  # else it says that
        _, options = settings.split(values)
        resolve(ServeConfig(**options), engine, ENDLESS)
