"""Fields of models as options of commands."""

from pathlib import Path

import pytest

from hemiola.runtime.api import SamplingParams, Strict
from hemiola.runtime.bench.options import BenchOptions
from hemiola.runtime.cli.options import options_of, read, spelled
from hemiola.runtime.config import ServeConfig
from hemiola.runtime.errors import Refused


@pytest.mark.parametrize("model", [ServeConfig, SamplingParams, BenchOptions])
def test_every_field_is_an_option_with_its_description_and_default(model: type[Strict]) -> None:
    options = {parameter.name: parameter for parameter in options_of(model)}
    assert list(options) == list(model.model_fields)
    for name, field in model.model_fields.items():
        shown = options[name].annotation.__metadata__[0].help
        assert field.description and shown.startswith(field.description)
        if field.default:
            assert shown.endswith(f"(default: {spelled(field.default)})")


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
    with pytest.raises(Refused, match="--logit-bias is '5'; write INT=FLOAT"):
        read(SamplingParams, "logit_bias", ["5"])
