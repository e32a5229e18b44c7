"""The table "What one request may cost" of docs/serving.md: every field is in it, and its limits are kept."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from kit.guided import grammars

from hemiola.runtime.api import SamplingParams, StructuredOutputsParams
from hemiola.runtime.choose.rules import RuleTable
from hemiola.runtime.errors import Refused
from hemiola.runtime.schedule.request import Bounds, new_request
from hemiola.runtime.serving.ask import (
    ALIASES,
    FIXED,
    KEYS,
    check_scores,
    check_total,
    read_ask,
    read_request,
)
from hemiola.runtime.serving.openai.answer import Expected
from hemiola.runtime.serving.openai.model import ServedModel
from hemiola.runtime.serving.openai.response_reply import ResponseChoice, ResponseReply
from hemiola.runtime.serving.openai.responses import ResponsesRequest
from hemiola.runtime.serving.openai.schema import ApiRequest, ChatRequest, CompletionRequest, parse
from hemiola.runtime.text import Text

ROOT = Path(__file__).resolve().parents[2]
INT = 2**31 - 1
BOUNDS = Bounds(64, 64, 5000, (0,))
NUMBER = re.compile(r"-?[0-9][0-9,]*")


class Row(NamedTuple):
    fields: list[str]
    limit: str
    memory: str
    time: str


def rows() -> list[Row]:
    text = (ROOT / "docs/serving.md").read_text()
    section = text.partition("## What one request may cost\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [Row(re.findall("`([^`]+)`", cells[0]), *cells[1:]) for cells in lines]


def numbers(row: Row) -> set[int]:
    return {int(number.replace(",", "")) for number in NUMBER.findall(row.limit)}


# Who takes a request with such a value, or refuses it.


def sampling(**values: Any) -> None:
    new_request(1, [1], SamplingParams(**values), BOUNDS, lambda text: [1] * len(text))


def guided(**values: Any) -> None:
    grammars().compile(StructuredOutputsParams(**values))


class Asked:
    """A Triton request whose parameters these are."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def inputs(self) -> list[Any]:
        return [Tensor(name, ids) for name, ids in self.values.items() if isinstance(ids, list)]

    def parameters(self) -> str:
        return json.dumps({name: v for name, v in self.values.items() if not isinstance(v, list)})

    def timeout(self) -> int:
        return 0


class Tensor(NamedTuple):
    own_name: str
    values: list[str]

    def name(self) -> str:
        return self.own_name

    def as_numpy(self) -> Any:
        return np.array([value.encode() for value in self.values], object)


def triton(**values: Any) -> None:
    asked = read_request(Asked(values))
    if "cancel" not in asked:
        read_ask({"text_input": "a"} | asked)


def completion(**values: Any) -> None:
    body = json.dumps({"model": "m", "prompt": "a"} | values).encode()
    request = parse(CompletionRequest, body)
    request.params(request.max_tokens or 16, request.logprobs)


def chat(**values: Any) -> None:
    message = {"role": "user", "content": "a"}
    request = parse(ChatRequest, json.dumps({"model": "m", "messages": [message]} | values).encode())
    request.params(request.most_tokens or 16, request.num_logprobs)


def response(**values: Any) -> None:
    request = parse(ResponsesRequest, json.dumps({"model": "m", "input": "a"} | values).encode())
    request.chat().params(request.max_output_tokens or 16, None)


def prompts(num_tokens: int, num_scored: int) -> None:
    check_total(num_tokens, 64, num_scored)


def repeated(**values: Any) -> None:
    model = ServedModel("m", 64, "identity", None, 1)
    request = parse(ResponsesRequest, json.dumps({"model": "m", "input": "a"} | values).encode())
    ResponseReply(model, request, ResponseChoice([1], Expected()))


def rendered(roles: int) -> None:
    """A conversation in which so many roles are none that its template names."""
    text = object.__new__(Text)  # it needs no tokenizer
    text.template, text.special = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}", {}
    text.chat([{"role": f"r{i}", "content": "a"} for i in range(roles)])


def a_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


# By field: a limit that stands in the table, who keeps it, the most that is taken and one more.
SCORES = {"num_tokens": 2**21, "num_scored": 2}
LIMITS: list[tuple[str, int, Callable[..., object], dict[str, Any], dict[str, Any]]] = [
    *((name, INT, sampling, {name: INT}, {name: INT + 1}) for name in ("max_tokens", "top_k", "num_drafts")),
    ("max_completion_tokens", INT, chat, {"max_completion_tokens": INT}, {"max_completion_tokens": INT + 1}),
    ("max_output_tokens", INT, response, {"max_output_tokens": INT}, {"max_output_tokens": INT + 1}),
    ("min_tokens", INT, sampling, {"min_tokens": INT, "max_tokens": INT}, {"min_tokens": INT + 1}),
    ("temperature", 0, sampling, {"temperature": 0.0}, {"temperature": -1e-9}),
    ("top_p", 1, sampling, {"top_p": 1.0}, {"top_p": 1.001}),
    ("top_p", 0, sampling, {"top_p": 1e-9}, {"top_p": 0.0}),
    ("min_p", 1, sampling, {"min_p": 1.0}, {"min_p": 1.001}),
    ("min_p", 0, sampling, {"min_p": 0.0}, {"min_p": -1e-9}),
    ("seed", 64, sampling, {"seed": 2**64 - 1}, {"seed": 2**64}),
    ("random_seed", 64, triton, {"random_seed": 2**64 - 1}, {"random_seed": 2**64}),
    ("stop", 1024, sampling, {"stop": ["a"] * 1024}, {"stop": ["a"] * 1025}),
    ("stop", 64, chat, {"stop": ["a"] * 64}, {"stop": ["a"] * 65}),
    ("stop", 2048, sampling, {"stop": ["a", "b" * 2047]}, {"stop": ["a", "b" * 2048]}),
    ("stop_token_ids", 1024, sampling, {"stop_token_ids": [1] * 1024}, {"stop_token_ids": [1] * 1025}),
    ("repetition_penalty", 0, sampling, {"repetition_penalty": 1e-9}, {"repetition_penalty": 0.0}),
    *((f"{name}_penalty", 2, sampling, {f"{name}_penalty": 2.0}, {f"{name}_penalty": 2.01})
      for name in ("presence", "frequency")),
    *((f"{name}_penalty", -2, sampling, {f"{name}_penalty": -2.0}, {f"{name}_penalty": -2.01})
      for name in ("presence", "frequency")),
    ("logit_bias", 1024, sampling, {"logit_bias": dict.fromkeys(range(1024), 1.0)},
     {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
    ("bad_words", 1024, sampling, {"bad_words": ["a"] * 1024}, {"bad_words": ["a"] * 1025}),
    ("bad_words", 4096, sampling, {"bad_words": ["a" * 2047]}, {"bad_words": ["a" * 2048]}),
    ("bad_words", 16384, SamplingParams, {"bad_words": ["a" * 16384]}, {"bad_words": ["a" * 16385]}),
    ("bad_words_ids", 1024, sampling, {"bad_words_ids": [[1]] * 1024}, {"bad_words_ids": [[1]] * 1025}),
    ("bad_words_ids", 4096, sampling, {"bad_words_ids": [[1] * 1024] * 4},
     {"bad_words_ids": [*[[1] * 1024] * 4, [1]]}),
    ("choice", 2**18, guided, {"choice": ["a"]}, {"choice": ["a" * 2**18]}),
    ("regex", 2**18, guided, {"regex": "a"}, {"regex": "a" * 2**18}),
    ("grammar", 2**18, guided, {"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "' + "a" * 2**18 + '"'}),
    ("json", 2**18, guided, {"json": {"const": "a"}}, {"json": {"const": "a" * 2**18}}),
    ("text", 2**18, guided, {"json": {"const": "a"}}, {"json": {"const": "a" * 2**18}}),
    ("response_format", 2**18, guided, {"json": {"const": "a"}}, {"json": {"const": "a" * 2**18}}),
    ("tools", 2**18, guided, {"grammar": 'root ::= "a"'}, {"grammar": "#" * 2**18}),
    ("tools", 64, chat, {"tools": [a_tool("a" * 64)]}, {"tools": [a_tool("a" * 65)]}),
    ("logprobs", 20, sampling, {"logprobs": 20}, {"logprobs": 21}),
    ("logprobs", 2**22, check_scores, {"num_tokens": 2**22, "num_scored": 0}, SCORES),
    ("top_logprobs", 2**22, check_scores, {"num_tokens": 2**22, "num_scored": 0}, SCORES),
    ("logprobs", 20, completion, {"logprobs": 20}, {"logprobs": 21}),
    ("prompt_logprobs", 20, sampling, {"prompt_logprobs": 20}, {"prompt_logprobs": 21}),
    ("prompt_logprobs", 20, completion, {"prompt_logprobs": 20}, {"prompt_logprobs": 21}),
    ("prompt_logprobs", 20, chat, {"prompt_logprobs": 20}, {"prompt_logprobs": 21}),
    ("top_logprobs", 20, chat, {"logprobs": True, "top_logprobs": 20},
     {"logprobs": True, "top_logprobs": 21}),
    ("prompt_logprobs", 2**23, prompts, {"num_tokens": 2**16, "num_scored": 0},
     {"num_tokens": 2**16, "num_scored": 1}),
    ("priority", INT, sampling, {"priority": INT}, {"priority": INT + 1}),
    ("priority", -(2**31), sampling, {"priority": -(2**31)}, {"priority": -(2**31) - 1}),
    ("cache_salt", 1024, sampling, {"cache_salt": "a" * 1024}, {"cache_salt": "a" * 1025}),
    ("user", 2**21, repeated, {"user": "a" * (2**21 - 1000)}, {"user": "a" * 2**21}),
    ("metadata", 2**21, repeated, {"metadata": {"a": "a" * (2**21 - 1000)}}, {"metadata": {"a" * 2**21: ""}}),
    ("messages", 16, rendered, {"roles": 16}, {"roles": 17}),
    ("n", 64, triton, {"n": 64}, {"n": 65}),
    ("n", 2**23, prompts, {"num_tokens": 2**16, "num_scored": 0}, {"num_tokens": 2**16, "num_scored": 1}),
    ("n", 128, completion, {"n": 128}, {"n": 129}),
    ("timeout", 2**63, triton, {"timeout": 2**63}, {"timeout": 2**63 + 1}),
    ("cancel", 1024, triton, {"cancel": ["a"] * 1024}, {"cancel": ["a"] * 1025}),
]  # fmt: skip


def test_every_field_of_a_request_has_a_row() -> None:
    known = {
        *SamplingParams.model_fields,
        *(field.alias or name for name, field in StructuredOutputsParams.model_fields.items()),
        *set(KEYS) - set(ALIASES) - set(FIXED),
        *(
            name
            for kind in (ApiRequest, ChatRequest, CompletionRequest, ResponsesRequest)
            for name in kind.model_fields
        ),
    }
    found = [name for row in rows() for name in row.fields]
    assert set(found) - set(ALIASES) == known, "a field has no row in docs/serving.md, or a row no field"
    assert set(ALIASES.values()) <= known
    assert {name for name in found if found.count(name) > 1} == {"logprobs"}, "it is a number or a flag"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.fields[0])
def test_a_row_says_what_a_field_costs(row: Row) -> None:
    assert all((row.limit, row.memory, row.time)) and "|" not in "".join(row[1:])


def test_every_number_among_the_limits_is_tried() -> None:
    tried: dict[str, set[int]] = {}
    for name, number, *_ in LIMITS:
        tried.setdefault(name, set()).add(number)
    for row in rows():
        for name in row.fields:
            stated = numbers(row)
            assert tried.get(name, stated) == stated, f"{name}: {stated} in the table, {tried[name]} tried"
        assert not numbers(row) or set(row.fields) & tried.keys(), f"{row.fields}: no limit is tried"


def test_lists_that_no_graph_holds_are_named() -> None:
    held, times = RuleTable.HELD, {name: row.time for row in rows() for name in row.fields}
    for name, words in (
        ("stop_token_ids", f"beyond {held.stops} ids no graph"),
        ("logit_bias", f"beyond {held.biases} ids no graph"),
        (
            "bad_words_ids",
            f"beyond {held.words} words, or {held.before} ids before their last ones, no graph",
        ),
    ):
        assert words in times[name]


@pytest.mark.parametrize(
    ("name", "limit", "take", "most", "more"), LIMITS, ids=[f"{n}-{limit}" for n, limit, *_ in LIMITS]
)
def test_a_limit_takes_what_it_says_and_refuses_one_more(
    name: str, limit: int, take: Callable[..., object], most: dict[str, Any], more: dict[str, Any]
) -> None:
    take(**most)
    with pytest.raises(Refused) as refused:
        take(**more)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600
