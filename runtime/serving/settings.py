"""A served model's settings: 1/model.json in its folder, overridden by the parameters of its config.pbtxt."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from hemiola.runtime.api import Strict
from hemiola.runtime.errors import Refused
from hemiola.runtime.json_file import parse_json, read_json
from hemiola.runtime.options import ServeConfig

FILE = "model.json"


class ModelSettings(Strict):
    """What a model has beside its LLM's options."""

    engine_dir: str = Field(description="made by build-engine")
    device: int | None = Field(
        default=None,
        ge=0,
        description="number of the GPU, among those in CUDA_VISIBLE_DEVICES; default: the first",
    )
    max_queue: int = Field(
        default=256, ge=0, description="requests that may wait for a row; more are refused"
    )
    min_priority: int = Field(
        default=0,
        le=0,  # who asks for none has 0
        description="smallest priority number that callers may send; lower numbers run first",
    )
    log_requests: bool = Field(
        default=False, description="write a line per request to stderr, without its text"
    )
    heartbeat_file: str = Field(default="", description="shows `hemiola serve` that the engine moves")
    progress_file: str = Field(default="", description="shows `hemiola serve` how far the engine is")
    num_restarts: int = Field(default=0, ge=0, description="times that this server was started again")

    door_key: str = Field(default="", description="proves that a door of `hemiola serve` marked an arrival")


OWN = tuple(name for name in ModelSettings.model_fields)
LAUNCHERS = ("heartbeat_file", "progress_file", "num_restarts", "door_key")  # which nobody else may say
KNOWN = tuple(name for name in (*OWN, *ServeConfig.model_fields) if name not in LAUNCHERS)


def read(folder: Path, parameters: Mapping[str, Mapping[str, str]]) -> tuple[ModelSettings, dict[str, Any]]:
    """The settings, and the options of LLM. folder: that of model.py."""
    values = _from_file(folder / FILE)
    for name, value in parameters.items():
        text = value["string_value"]
        try:
            values[name] = text if name == "engine_dir" else parse_json(text)
        except ValueError:
            values[name] = text
    for name, value in values.items():
        if isinstance(value, str) and value.startswith("${"):
            message = f"{name} is the placeholder {value}"
            raise Refused(
                "missing",
                message=message,
                way_out=f"write its value into {FILE}, or start with `hemiola serve`",
            )
    if "engine_dir" not in values:
        message = f"{folder / FILE} has no engine_dir"
        raise Refused(
            "missing", "engine_dir", message=message, way_out="add it, or start with `hemiola serve`"
        )
    return split(values, LAUNCHERS)


def split(values: Mapping[str, Any], beside: Collection[str] = ()) -> tuple[ModelSettings, dict[str, Any]]:
    """Checked: no key is unknown. beside: further ones that may be there."""
    for name in values:
        if name not in KNOWN and name not in beside:
            message = f"unknown setting {name!r}"
            raise Refused("unknown", name, message=message, way_out=f"the settings are {', '.join(KNOWN)}")
    model_settings = ModelSettings(**{name: value for name, value in values.items() if name in OWN})
    options = {name: value for name, value in values.items() if name not in OWN}
    ServeConfig(**options)
    return model_settings, options


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = read_json(path, "correct it")
    if not isinstance(content, dict):
        message = f"{path} holds a {type(content).__name__}"
        raise Refused("wrong_type", message=message, way_out="write an object of settings")
    return content
