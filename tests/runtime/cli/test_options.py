"""Fields of models as options of commands."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from hemiola.runtime.api import SamplingParams, Strict
from hemiola.runtime.bench.options import BenchOptions
from hemiola.runtime.cli.options import options_of, read, spelled, takes
from hemiola.runtime.config import ServeConfig
from hemiola.runtime.errors import Name, Refused, in_python


@pytest.mark.parametrize("model", [ServeConfig, SamplingParams, BenchOptions])
def test_every_field_is_an_option_with_its_description_and_default(model: type[Strict]) -> None:
    options = {parameter.name: parameter for parameter in options_of(model)}
    assert list(options) == list(model.model_fields)
    for name, field in model.model_fields.items():
        shown = options[name].annotation.__metadata__[0].help
        for other in filter(lambda other: "_" in other, options):
            shown = shown.replace(f"--{other.replace('_', '-')}", other)
        assert field.description and shown.startswith(field.description)
        if field.default:
            assert shown.endswith(f"(default: {spelled(field.default)})")


def test_help_names_other_options_as_they_are_typed() -> None:
    """It named them as Python does: `auto: see memory_fraction`."""
    options = {
        parameter.name: parameter.annotation.__metadata__[0].help for parameter in options_of(ServeConfig)
    }
    assert "see --memory-fraction" in options["cache_bytes"]
    assert "a multiple of page_len" in options["snapshot_interval"], "that one is no option of the command"


def test_what_is_left_out_is_no_option_and_a_default_of_the_command_is_shown() -> None:
    (option,) = options_of(SamplingParams, set(SamplingParams.model_fields) - {"top_k"}, {"top_k": 5})
    assert option.annotation.__metadata__[0].help.endswith("(default: 5)")


@pytest.mark.parametrize(
    ("model", "name", "text", "value"),
    [
        (ServeConfig, "prefix_cache", "false", False),
        (ServeConfig, "prefix_cache", "auto", "auto"),
        (ServeConfig, "max_rows", "4", 4),
        (ServeConfig, "max_rows", "many", "many"),
        (ServeConfig, "max_row", "4", "4"),
        (ServeConfig, "drafts", "none", "none"),
        (SamplingParams, "stop", ["1", "null"], ("1", "null")),
        (SamplingParams, "stop_token_ids", ["1", "x"], (1, "x")),
        (SamplingParams, "logit_bias", ["5=-1", "6=inf"], {5: -1.0, 6: float("inf")}),
        (SamplingParams, "cache_salt", "12", "12"),
        (BenchOptions, "text", "12", Path("12")),
        (BenchOptions, "request_rate", "inf", float("inf")),
    ],
)
def test_a_value_is_read_as_its_type_says(
    model: type[Strict], name: str, text: str | list[str], value: object
) -> None:
    assert read(model, name, text) == value and type(read(model, name, text)) is type(value)


def test_a_pair_without_an_equals_sign_is_refused() -> None:
    with pytest.raises(Refused, match="logit_bias is '5'; write INT=FLOAT"):
        read(SamplingParams, "logit_bias", ["5"])


LONG = Refused("out_of_range", "max_len", 9, way_out=("raise num_pages or start with ", Name("max_len", 10)))


class Shown(Strict):
    max_len: int = 1
    drafts: str = ""
    text: Path | None = None


def command_of(refuses: Refused | None = None) -> Callable[..., dict[str, object]]:
    """A command with options of its own and those of a model, and what it is called with."""
    called: dict[str, object] = {}

    @takes(options_of(Shown))
    def command(
        engine_dir: Annotated[Path, typer.Option(help="a folder")] = Path("e"),
        many: Annotated[list[Path] | None, typer.Option(help="folders")] = None,
        name: Annotated[str, typer.Option(help="a name")] = "",
        **options: Any,
    ) -> None:
        called.update(engine_dir=engine_dir, many=many, name=name, **options)
        if refuses is not None:
            raise refuses

    app = typer.Typer()
    app.command()(command)

    def run(*arguments: str) -> dict[str, object]:
        app(args=list(arguments), standalone_mode=False)
        return called

    return run


def test_paths_and_texts_reach_the_command_as_it_declares_them() -> None:
    run = command_of()
    found = run("--engine-dir", "a", "--many", "b", "--many", "c", "--name", "é", "--text", "\udcff")
    assert found["engine_dir"] == Path("a") and found["many"] == [Path("b"), Path("c")]
    assert found["name"] == "é" and found["text"] == Path("\udcff"), "a file's name may be any bytes"
    assert run() | {"max_len": None} == {
        "engine_dir": Path("e"), "many": None, "name": "", "max_len": None, "drafts": None, "text": None
    }  # fmt: skip


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--engine-dir", "--engine-dir is empty; give a folder"),
        ("--many", "--many is empty; give a file"),
        ("--text", "--text is empty; give a file"),
    ],
)
def test_an_empty_path_is_not_the_folder_that_the_command_is_called_in(option: str, said: str) -> None:
    with pytest.raises(Refused) as refused:
        command_of()(option, "")
    assert str(refused.value) == said


@pytest.mark.parametrize("option", ["--name", "--drafts", "--engine-dir"])  # nor can safetensors open it
def test_bytes_of_a_text_that_are_no_utf8_are_not_called_surrogates(option: str) -> None:
    with pytest.raises(Refused) as refused:
        command_of()(option, "d\udcffef")
    assert str(refused.value) == f"{option} is not UTF-8 (invalid start byte at byte 1); convert it"


@pytest.mark.parametrize(
    ("refused", "shown"),
    [
        (LONG, "--max-len is 9; raise num_pages or start with --max-len 10"),
        (Refused("wrong_type", "drafts[0]", 5), "--drafts[0] is 5"),
        (Refused("unknown", "drafts.x", message=(Name("drafts.x"), " is unknown")), "--drafts.x is unknown"),
        (Refused("wrong_type", "num_pages", "x"), "num_pages is 'x'"),
        (LONG.at("chat"), "chat: --max-len is 9; raise num_pages or start with --max-len 10"),
        (LONG.at("a.json: chat", in_python), f"a.json: chat: {LONG}"),
        (LONG.at("--compare max_len=9", in_python), f"--compare max_len=9: {LONG}"),
        (Refused("exhausted", message="no memory: max_len is 9"), "no memory: max_len is 9"),
        (
            Refused("damaged", "limits.max_len", message="a.json: limits.max_len is 9"),
            "a.json: limits.max_len is 9",
        ),
        (Refused("not_found", message="/tmp/max_len is no folder"), "/tmp/max_len is no folder"),
        (Refused("other", message="--name is 'max_len'"), "--name is 'max_len'"),
    ],
)
def test_what_a_command_refuses_is_not_named_as_in_python(refused: Refused, shown: str) -> None:
    with pytest.raises(Refused) as caught:
        command_of(refused)()
    assert (str(caught.value), caught.value.code) == (shown, refused.code)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[" * 100_000, "nested too deeply"), ("9" * 10_000, "a number of too many digits"), ("{", "Expecting")],
)
def test_json_that_cannot_be_read_says_why_and_is_not_shown_whole(text: str, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        read(SamplingParams, "structured_outputs", text)
    said = str(refused.value)
    assert said.startswith("structured_outputs is '") and f"({reason}" in said and len(said) < 200
