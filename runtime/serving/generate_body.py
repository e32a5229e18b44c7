"""A body of Triton's generate endpoints, before tritonserver reads it: it answers 500 to what is of another
type than its config says, and names no field."""

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from hemiola.runtime.errors import Amount, Name, Refused
from hemiola.runtime.json_file import Repeated, parse_json
from hemiola.runtime.serving.ask import ALIASES, JSON, check_count, check_id
from hemiola.runtime.serving.error_text import KINDS
from hemiola.runtime.serving.model_folder import find_model_folder

GENERATE = re.compile(rb"POST /v2/models/[^/? ]+(?:/versions/[^/? ]+)?/generate(_stream)?[ ?].*")
INPUT = re.compile(r'^ +\{ name: "(\w+)" +data_type: TYPE_(\w+) +dims: \[ (-?1) \]', re.MULTILINE)
SURROGATE = re.compile("[\ud800-\udfff]")
WANTED = {"INT64": "a whole number", "FP32": "a number", "BOOL": "true or false", "STRING": "a text"}
REFUSED = f"[{KINDS[Refused]}] "  # as the model begins


class Input(NamedTuple):
    """A tensor of the model."""

    kind: str  # one of WANTED
    is_list: bool


@cache
def inputs() -> dict[str, Input]:
    """As config.pbtxt has them."""
    text = (find_model_folder() / "config.pbtxt").read_text().partition("\noutput [")[0]
    return {name: Input(kind, dims == "-1") for name, kind, dims in INPUT.findall(text)}


MAX_KEYS = 128  # tritonserver's time grows with the square of their number: 40,000 held up all for 12 s


def check_generate(body: bytes | bytearray, one_response: bool = False) -> None:
    """Raises Refused, in the model's words."""
    try:
        # Bytes that are no UTF-8 become lone surrogates, which are refused where they stand.
        asked = parse_json(body.decode("utf-8-sig", errors="surrogateescape"), unique=True)
    except Repeated as error:
        raise Refused("conflict", message=f"{error}", way_out="give it once") from None
    except ValueError as error:
        raise Refused(
            "malformed", message=f"the body is no JSON ({error})", way_out="send an object"
        ) from None
    if not isinstance(asked, dict):
        raise Refused("wrong_type", "the body", asked, way_out="send an object")
    _check_keys("the body", asked)
    for name, value in asked.items():
        if name == "id":
            _check(name, value, "STRING")
            check_id(value)
        elif name == "parameters":
            _check_parameters(value, one_response)
        else:
            _check_named(name, value, one_response)


def _check_named(name: str, value: object, one_response: bool) -> None:
    """A key of the body, or of its parameters: tritonserver makes a tensor of either."""
    if name in inputs():
        _check_tensor(name, value, inputs()[name])
    else:
        _check_parameter(name, value)
    if one_response and ALIASES.get(name, name) == "stream" and value in (True, [True]):
        limit, way_out = "but generate sends one response", "use generate_stream, or leave it out"
        raise Refused("conflict", name, True, limit, way_out)


def _check_keys(what: str, given: Mapping[str, object]) -> None:
    if len(given) > MAX_KEYS:
        message = f"{what} has {len(given)} keys, the limit is {MAX_KEYS}"
        raise Refused("too_long", message=message, way_out="leave those out that mean nothing")


def _check_tensor(name: str, value: object, declared: Input) -> None:
    is_nested = isinstance(value, dict) or (
        isinstance(value, list) and [type(one) for one in value[:2]] != [str]
    )
    if name in JSON and is_nested:
        way_out = f"give its JSON as a text, such as {json.dumps(JSON[name])}"
        raise Refused("wrong_type", name, type(value), way_out=way_out)
    if not isinstance(value, list):
        _check(name, value, declared.kind)
        return
    if not declared.is_list and len(value) != 1:
        raise Refused("too_long", name, Amount(len(value), "values"), way_out="give one")
    if declared.is_list:
        check_count(name, len(value))
    for at, entry in enumerate(value):
        if not _fits(entry, declared.kind):
            _check(f"{name}[{at}]", entry, declared.kind)


def _check_parameters(value: object, one_response: bool) -> None:
    if not isinstance(value, Mapping):
        raise Refused("wrong_type", "parameters", value, way_out="give an object")
    _check_keys("parameters", value)
    for name, parameter in value.items():
        _check_named(name, parameter, one_response)


def _check_parameter(name: str, value: object) -> None:
    """The model says which there are."""
    kind = {str: "STRING", int: "INT64"}.get(type(value))
    if SURROGATE.search(name) or "\0" in name:
        raise Refused("unknown", message=f"unknown key {name[:80]!r}", way_out="leave it out")
    if kind is not None:
        _check(name[:80], value, kind)
    elif value is None or isinstance(value, (list, dict)):
        way_out = "give a text, a whole number, true or false"
        raise Refused("wrong_type", name[:80], value, way_out=way_out)
    elif isinstance(value, float) and math.isinf(value):  # 1e400, which its parser takes for no JSON
        raise Refused("out_of_range", name[:80], value, way_out="give a whole number")


def _check(name: str, value: object, kind: str) -> None:
    if _fits(value, kind):
        return
    if kind == "STRING" and type(value) is str:
        at = SURROGATE.search(value)
        why = "(a lone surrogate, or no UTF-8)"
        where = f" is not valid Unicode at character {at.start() if at else 0} {why}"
        raise Refused("malformed", name, message=(Name(name), where), way_out="remove it")
    if kind == "INT64" and type(value) is int:
        raise Refused("out_of_range", name, value, "which needs more than 64 bits", "give a smaller number")
    if value is None:
        way_out = f"leave it out, or give {WANTED[kind]}"
        raise Refused("wrong_type", name, message=(Name(name), " is null"), way_out=way_out)
    raise Refused("wrong_type", name, value, way_out=f"give {WANTED[kind]}")


def _fits(value: Any, kind: str) -> bool:
    match kind:
        case "INT64":
            return type(value) is int and -(2**63) <= value < 2**63
        case "FP32":
            return (type(value) is int and abs(value) < 2**1023) or (
                type(value) is float and not math.isinf(value)
            )
        case "BOOL":
            return type(value) is bool
        case _:
            return type(value) is str and not (not value.isascii() and SURROGATE.search(value))
