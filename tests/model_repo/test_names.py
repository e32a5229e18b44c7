"""Each field of SamplingParams at every door: Triton's inputs, gRPC requests and OpenAI bodies have it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import pytest
from google.protobuf import text_format
from pydantic import BaseModel, ValidationError
from tritonclient.grpc import model_config_pb2

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.serving.ask import JSON, LISTS
from hemiola.runtime.serving.openai.responses import ResponsesRequest
from hemiola.runtime.serving.openai.schema import ChatRequest, CompletionRequest
from hemiola.runtime.serving.packing import pack

CONFIG = Path(__file__).resolve().parents[2] / "model_repo/hemiola/config.pbtxt"
# OpenAI's own: a flag in a chat, with another name of the number; /v1/responses has no log-probabilities
OPENAI = {
    (ChatRequest, "logprobs"): ("logprobs", True),
    (ResponsesRequest, "logprobs"): None,
    (ResponsesRequest, "prompt_logprobs"): None,
    (ResponsesRequest, "max_tokens"): ("max_output_tokens", 1),
}


class Row(NamedTuple):
    """How a field of this type travels."""

    triton: str
    is_list: bool
    is_json: bool
    example: Any
    sent: str  # as a request parameter of this kind, or as a tensor of this type


def row(kind: Any) -> Row:
    (kind,) = (
        [one for one in get_args(kind) if one is not type(None)] if type(None) in get_args(kind) else [kind]
    )
    if kind == tuple[str, ...]:
        return Row("STRING", True, False, ("a",), "BYTES")
    if kind == tuple[int, ...]:
        return Row("INT64", True, False, (1,), "INT64")
    if kind == tuple[tuple[int, ...], ...]:
        return Row("STRING", False, True, ((1,),), "BYTES")
    if get_origin(kind) is Mapping:
        return Row("STRING", False, True, {1: 0.5}, "BYTES")
    if issubclass(kind, BaseModel):
        return Row("STRING", False, True, {"regex": "a"}, "BYTES")
    return {
        bool: Row("BOOL", False, False, True, "bool_param"),
        int: Row("INT64", False, False, 1, "int64_param"),
        float: Row("FP32", False, False, 0.5, "double_param"),
        str: Row("STRING", False, False, "a", "BYTES"),
    }[kind]


TABLE = {name: row(field.annotation) for name, field in SamplingParams.model_fields.items()}


@pytest.mark.parametrize("name", TABLE)
def test_a_sampling_parameter_is_missing_at_a_door(name: str) -> None:
    row = TABLE[name]
    config = text_format.Parse(CONFIG.read_text(), model_config_pb2.ModelConfig())
    (tensor,) = [tensor for tensor in config.input if tensor.name == name]
    assert tensor.data_type == model_config_pb2.DataType.Value(f"TYPE_{row.triton}")
    assert list(tensor.dims) == [-1 if row.is_list else 1]
    assert (name in LISTS, name in JSON) == (row.is_list, row.is_json)

    request = pack("m", [1], SamplingParams(**{name: row.example}), stream=True)
    tensors = [one.datatype for one in request.inputs if one.name == name]
    given = [request.parameters[name].WhichOneof("parameter_choice")] if name in request.parameters else []
    assert tensors + given == [
        "INT64" if name == "priority" else row.sent
    ]  # Triton has a `priority` of its own


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, ResponsesRequest])
@pytest.mark.parametrize("name", TABLE)
def test_an_openai_body_refuses_a_sampling_parameter(name: str, kind: type[BaseModel]) -> None:
    example = TABLE[name].example
    given = OPENAI.get((kind, name), (name, list(example) if isinstance(example, tuple) else example))
    required = {"model": "m", "messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
    body = {key: value for key, value in required.items() if key in kind.model_fields}
    if given is None:
        with pytest.raises(ValidationError, match=f"unknown option '{name}'"):
            kind.model_validate({**body, name: example})
    else:
        assert kind.model_validate(body | dict([given]))
