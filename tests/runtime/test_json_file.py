"""Files of JSON that Python's own reader does not take, or takes too much of its stack for."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hemiola.builder.checkpoint import Checkpoint, Config
from hemiola.runtime import manifest
from hemiola.runtime.bench.dataset import read_entries
from hemiola.runtime.errors import Refused
from hemiola.runtime.json_file import read_json
from hemiola.runtime.serving import settings
from hemiola.runtime.serving.engines import read_models

ENDLESS = {
    "[" * 100_000: "nested too deeply",
    '{"a":' * 100_000: "nested too deeply",
    '{"format": ' + "9" * 10_000 + "}": "a number of too many digits",
    '{"a": "\udcff"}': "invalid start byte",
    "{": "Expecting property name",
}
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "manifest": ("manifest.json", lambda file: manifest.parse(file)),
    "checkpoint": ("config.json", lambda file: Checkpoint(file.parent)),
    "eos": ("generation_config.json", lambda file: Checkpoint.eos_ids(_folder(file), Config({}, ""))),
    "settings": ("model.json", lambda file: settings.read(file.parent, {})),
    "models": ("models.json", lambda file: read_models(file, (), ())),
    "workload": ("lines.jsonl", lambda file: read_entries(file, None)),
}


def _folder(file: Path) -> Any:
    """A checkpoint that nothing but this file is read of."""
    made = SimpleNamespace(path=file.parent, config=Config({}, ""))
    made.token_configs = lambda text: Checkpoint.token_configs(made, text)
    return made


@pytest.mark.parametrize(
    ("text", "reason"), ENDLESS.items(), ids=["lists", "objects", "digits", "bytes", "cut"]
)
@pytest.mark.parametrize("reader", READERS)
def test_json_that_python_cannot_read_is_no_traceback_and_its_file_is_named(
    tmp_path: Path, reader: str, text: str, reason: str
) -> None:
    name, read = READERS[reader]
    file = tmp_path / name
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(Refused) as refused:
        read(file)
    said = str(refused.value)
    assert said.startswith(str(file)) and len(said) < 500 and "\n" not in said and "; " in said
    assert reason in said or (reader == "workload" and "is not UTF-8" in said)


@pytest.mark.parametrize("depth", [300, 480, 700, 900])
def test_json_that_is_read_is_not_too_deep_for_what_is_done_with_it(tmp_path: Path, depth: int) -> None:
    (tmp_path / "config.json").write_text('{"a":' * depth + "1" + "}" * depth)
    with pytest.raises(Refused, match=r"has no model.safetensors|config.json cannot be read as JSON"):
        Checkpoint(tmp_path)
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"prompt": 1})[:-2] + "[" * depth + "]" * depth + "}")
    for _, entry in read_entries(lines, None):
        assert isinstance(entry, dict)


def test_a_parameter_of_a_model_that_python_cannot_read_is_refused_as_text(tmp_path: Path) -> None:
    for text in ("[" * 100_000, "9" * 10_000):
        with pytest.raises(Refused, match=r"^max_rows is '.{59}\.\.\. \(\d+ characters\); give a whole"):
            settings.read(tmp_path, {"engine_dir": {"string_value": "e"}, "max_rows": {"string_value": text}})


def test_a_file_is_read_as_utf8_wherever_one_is(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes('"é"'.encode())
    assert read_json(tmp_path / "a.json", "") == "é"


def test_a_model_that_stands_twice_in_a_file_is_lost_in_silence(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_text('{"a": {"engine_dir": "x"}, "a": {"engine_dir": "y"}}')
    with pytest.raises(Refused, match="the key 'a' stands twice in one object"):
        read_models(file, (), ())
