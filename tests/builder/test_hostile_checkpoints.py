"""Checkpoints of strangers: each field of each JSON file, wrong in each way. They are refused in one line, or
taken; never a traceback, a hang, or gigabytes."""

import io
import json
import os
import random
import secrets
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import checkpoints, quantised
from kit.stranger import all_places, put
from safetensors.torch import load_file, save_file

from hemiola.builder import build as module
from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.builder.tokenizer import copy_tokenizer
from hemiola.runtime.errors import Refused

HUGE = 10**400
NUMBERS = [
    True,
    False,
    0,
    1,
    -1,
    3,
    2**31,
    2**62,
    2**64,
    HUGE,
    0.0,
    -0.0,
    1.5,
    1e308,
    float("inf"),
    float("nan"),
]
ESCAPE = "\x1b]0;a\x07\nerror: b"  # a terminal's title, and a line of its own
TEXTS = ["", "x", ESCAPE, "\ud800", "4096", "x" * 10_000, "M*-E" * 3000]
LISTS = [[], [None], [1], [2**70], ["x"], [[]], ["full_attention"] * 5000, [1.5] * 5000, {}, {"a": 1}]
FLOATS = [{"__float__": value} for value in ("nan", "x", None, [1], True, "Infinity")]
WRONG: list[Any] = [None, *NUMBERS, *TEXTS, *LISTS, *FLOATS]
FAMILIES = ("qwen3_5", "nemotron_h_moe")
NUM_TRIED = 150  # of some 2,500 for each family


class Reached(Exception):
    """A build that refused nothing so far."""


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Builds, up to the first file of the engine; returns what is refused, "" if nothing is. No line obeys a
    file, those of warnings included."""

    def reached(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(module, "fresh", reached)

    def attempt_(folder: Path) -> str:
        warnings = io.StringIO()
        try:
            with redirect_stderr(warnings):
                build(folder, tmp_path / "engine", Options())
        except Reached:
            said = ""
        except Refused as error:
            said = str(error)
        else:
            raise AssertionError("it was built")
        for line in (said, *warnings.getvalue().split("\n")):
            assert line.isprintable() and len(line) < 2000, line[:3000]
        return said

    return attempt_


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(request.param, tmp_path_factory.mktemp("source"))


def test_a_field_of_a_config_that_is_wrong_is_a_traceback_or_a_hang(
    folder: Path, attempt: Callable[..., str]
) -> None:
    seed = 0 if os.environ.get("CI") else secrets.randbelow(2**32)
    print("seed", seed)
    file = folder / "config.json"
    good = file.read_text()
    content = json.loads(good)
    tries = [(place, wrong) for place in all_places(content) for wrong in WRONG]
    try:
        for place, wrong in random.Random(seed).sample(tries, NUM_TRIED):
            file.write_text(json.dumps(put(content, place, wrong)))
            print(place, str(wrong)[:60], "->", attempt(folder)[:200] or "taken")
    finally:
        file.write_text(good)


def test_an_architecture_of_ten_thousand_letters_is_said_whole(
    folder: Path, attempt: Callable[..., str]
) -> None:
    file = folder / "config.json"
    good = file.read_text()
    file.write_text(json.dumps(json.loads(good) | {"architectures": ["M" * 10_000]}))
    try:
        assert "... (10002 characters) is not supported" in attempt(folder)
    finally:
        file.write_text(good)


@pytest.mark.parametrize("recipe", ["qwen_fp8", "modelopt_mixed", "compressed_w4a16"])
def test_a_field_about_quantised_weights_that_is_wrong_is_a_traceback(
    recipe: str, attempt: Callable[..., str], tmp_path: Path
) -> None:
    seed = 0 if os.environ.get("CI") else secrets.randbelow(2**32)
    print("seed", seed)
    source = checkpoints.make("qwen3_5", tmp_path / "source")
    folder = quantised.quantise(source, tmp_path, quantised.RECIPES[recipe]).quantised
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        file = folder / name
        if not file.exists():
            continue
        good = file.read_text()
        content = json.loads(good)
        places = [place for place in all_places(content) if place[0] == key]
        tries = [(place, wrong) for place in places for wrong in WRONG]
        for place, wrong in random.Random(seed).sample(tries, 40):
            file.write_text(json.dumps(put(content, place, wrong)))
            print(place, str(wrong)[:60], "->", attempt(folder)[:200] or "taken")
        file.write_text(good)


@pytest.mark.parametrize("place", ["architecture", "tensor", "scale", "index"])
def test_a_name_in_a_checkpoint_controls_a_terminal(
    place: str, attempt: Callable[..., str], tmp_path: Path
) -> None:
    source = checkpoints.make("qwen3_5", tmp_path / "source")
    weights = next(source.glob("*.safetensors"))
    match place:
        case "architecture":
            file = source / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [ESCAPE]}))
        case "index":
            index = {"weight_map": {ESCAPE: weights.name}}
            (source / "model.safetensors.index.json").write_text(json.dumps(index))
        case _:
            name = ESCAPE + (".weight_scale" if place == "scale" else "")
            save_file(load_file(weights) | {name: torch.ones(1)}, weights)
    assert "\ufffd]0;a\ufffd\ufffderror: b" in attempt(source)


FOUND = {  # these were tracebacks, hangs, engines that answer NaN, or lines of 90,000 characters
    "float of no text": ("vocab_size", {"__float__": None}),
    "float of a word": ("vocab_size", {"__float__": "x"}),
    "layers": ("num_hidden_layers", 2**31),
    "wide heads": ("head_dim", 2**31),
    "wider heads": ("head_dim", 2**64),
    "widest heads": ("head_dim", HUGE),
    "rotary share": ("rope_parameters", {"partial_rotary_factor": 1e308}),
    "no rotary share": ("rope_parameters", {"partial_rotary_factor": float("nan")}),
    "theta 0": ("rope_parameters", {"rope_theta": 0}),
    "theta infinity": ("rope_parameters", {"rope_theta": float("inf")}),
    "epsilon below 0": ("rms_norm_eps", -1),
    "epsilon NaN": ("rms_norm_eps", float("nan")),
    "long word": ("attention_bias", ["full_attention"] * 5000),
    "long limits": ("time_step_limit", [1.5] * 5000),
    "no layers": ("layers_block_type", []),
    "many layers": ("layers_block_type", ["mamba"] * 5000),
    "heads": ("linear_num_value_heads", 3 * 2**20),
    "channels": ("linear_key_head_dim", 2**20),
    "channels of Mamba": ("ssm_state_size", 2**20),
    "experts": ("num_experts", 2**18),  # a sparse file of 20 kB has all of them: 10 GB of objects
    "experts of Nemotron": ("n_routed_experts", 9 * 2**18),
}
FAMILY_OF = {"num_experts": "qwen3_next"} | dict.fromkeys(
    ("time_step_limit", "layers_block_type", "ssm_state_size", "n_routed_experts"), "nemotron_h_moe"
)


@pytest.mark.parametrize("case", FOUND)
def test_a_value_that_no_model_has_is_taken(case: str, attempt: Callable[..., str], tmp_path: Path) -> None:
    key, wrong = FOUND[case]
    source = checkpoints.make(FAMILY_OF.get(key, "qwen3_5"), tmp_path / "source")
    file = source / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: wrong}))
    assert (key if not isinstance(wrong, dict) else "config.json") in attempt(source)


def test_a_setting_in_a_warning_controls_a_terminal(attempt: Callable[..., str], tmp_path: Path) -> None:
    source = checkpoints.make("qwen3_5", tmp_path / "source")
    weights, file = next(source.glob("*.safetensors")), source / "config.json"
    save_file({name: w for name, w in load_file(weights).items() if not name.startswith("mtp.")}, weights)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mtp_num_hidden_layers": ESCAPE}))
    assert attempt(source) == ""


ENTRIES: dict[str, Callable[[dict[str, Any]], object]] = {  # what safetensors reads of a tensor
    "a list": lambda entry: [entry["dtype"], entry["shape"], entry["data_offsets"]],
    "more": lambda entry: entry | {"x": [[]], "name": ESCAPE},
    "gigabytes": lambda entry: entry | {"x": [[]] * 2**16},
    "a dtype that is an object": lambda entry: entry | {"dtype": {entry["dtype"]: None}},
    "another dtype": lambda entry: entry | {"dtype": "C64"},
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_header_that_only_safetensors_understands_is_a_traceback(
    kind: str, attempt: Callable[..., str], tmp_path: Path
) -> None:
    source = checkpoints.make("qwen3_5", tmp_path / "source")
    weights = next(source.glob("*.safetensors"))
    content = weights.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    name = next(name for name in header if name.endswith("norm.weight"))
    header[name] = ENTRIES[kind](header[name])
    packed = json.dumps(header).encode()
    weights.write_bytes(len(packed).to_bytes(8, "little") + packed + content[end:])
    assert ("safetensors" in attempt(source)) == (kind != "more")


def test_a_config_that_is_only_a_float_is_a_traceback(attempt: Callable[..., str], tmp_path: Path) -> None:
    source = checkpoints.make("qwen3_5", tmp_path / "source")
    (source / "config.json").write_text('{"__float__": "Infinity"}')
    assert "config.json has no architectures" in attempt(source)


SPARSE = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_file_of_terabytes_is_read(name: str, attempt: Callable[..., str], tmp_path: Path) -> None:
    source = checkpoints.make("qwen3_5", tmp_path / "source")
    with (source / name).open("wb") as file:
        file.truncate(2**42)
    assert f"{name} has {2**42} bytes" in attempt(source)


def test_a_config_that_becomes_gigabytes_is_read(attempt: Callable[..., str], tmp_path: Path) -> None:
    source = checkpoints.make("qwen3_5", tmp_path / "source")
    with (source / "config.json").open("ab") as file:
        file.write(b" " * 2**24)
    assert f"bytes, at most {2**24} are read" in attempt(source)


@pytest.mark.parametrize("part", ["[]", "{}"])
def test_an_index_of_60_megabytes_becomes_gigabytes(
    part: str, attempt: Callable[..., str], tmp_path: Path
) -> None:
    source = checkpoints.make("qwen3_5", tmp_path / "source")
    parts = ",".join([part] * 2**16)
    (source / "model.safetensors.index.json").write_text(f'{{"weight_map": {{}}, "metadata": [{parts}]}}')
    assert f"index.json has {2**16 + 3} brackets, at most {2**16} are read" in attempt(source)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("\ud800", "chat_template is not Unicode"),
        ("x" * 300_000, "chat_template has 300000 bytes, at most 262144 are read"),
        ([5, {"name": "default"}, {"template": "x"}, None], ""),
        ([{"name": "default", "template": {"a": 1}}], ""),
        ({"default": "x"}, ""),
    ],
)
def test_an_odd_chat_template_is_a_traceback(template: object, reason: str, tmp_path: Path) -> None:
    source = checkpoints.make("qwen3_5", tmp_path / "source")
    (source / "chat_template.jinja").unlink(missing_ok=True)
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (tmp_path / "out").mkdir()
    if reason:
        with pytest.raises(Refused, match=reason):
            copy_tokenizer(source, tmp_path / "out" / "tokenizer")
    else:
        copy_tokenizer(source, tmp_path / "out" / "tokenizer")
        assert not (tmp_path / "out" / "tokenizer" / "chat_template.jinja").exists()
