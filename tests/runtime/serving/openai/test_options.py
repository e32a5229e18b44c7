"""Every option of the official client is served, or refused by name: none is ignored in silence."""

import inspect
from collections.abc import Callable

import pytest
from kit.manual import ROOT
from kit.scripted_triton import ScriptedTriton, script
from openai import BadRequestError, OpenAI
from openai.resources import chat, completions

from hemiola.runtime.serving.openai.schema import PASSED, ChatRequest, CompletionRequest

TRANSPORT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
CREATE = {ChatRequest: chat.Completions.create, CompletionRequest: completions.Completions.create}
GIVEN = {
    ChatRequest: {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"model": "tiny", "prompt": "x"},
}
LABELS = {  # accepted and ignored: with what is refused
    "user": 5,
    "metadata": {"a": 1},
    "store": True,
    "service_tier": "flex",
    "safety_identifier": 5,
    "prompt_cache_key": 5,
    "prompt_cache_retention": 5,
    "verbosity": 5,
}


def options(kind: type) -> set[str]:
    return set(inspect.signature(CREATE[kind]).parameters) - TRANSPORT


def ask(client: OpenAI, kind: type, **given: object) -> Callable[[], object]:
    create = client.chat.completions.create if kind is ChatRequest else client.completions.create
    return lambda: create(**GIVEN[kind] | given)


@pytest.mark.parametrize("kind", CREATE)
def test_an_option_that_is_not_served_is_refused_by_name(
    client: OpenAI, triton: ScriptedTriton, kind: type
) -> None:
    others = options(kind) - set(kind.model_fields) - set(PASSED)
    assert len(others) >= (7 if kind is ChatRequest else 0)
    for name in others:
        with pytest.raises(BadRequestError, match=f"unknown option '{name}'") as caught:
            ask(client, kind, **{name: {"type": "x"}})()
        assert (caught.value.code, caught.value.param) == ("unknown_parameter", name)
    assert not triton.requests


def test_what_changes_nothing_is_in_the_manual_and_checked(client: OpenAI, triton: ScriptedTriton) -> None:
    manual = (ROOT / "docs/openai.md").read_text()
    rows = [line for line in manual.splitlines() if line.endswith("| accepted and ignored |")]
    row = rows[0]  # of options; the other one is of a message's keys
    for name, bad in LABELS.items():
        assert f"`{name}`" in row
        with pytest.raises(BadRequestError) as caught:
            ask(client, ChatRequest, **{name: bad})()
        assert caught.value.param.split(".")[0] == name
    triton.script = script("ok")
    good = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    ask(client, ChatRequest, **good, safety_identifier="s", prompt_cache_key="k")()
    labelled = triton.inputs()
    ask(client, ChatRequest)()
    assert triton.inputs() == labelled


def test_every_served_option_is_in_the_manual() -> None:
    manual = (ROOT / "docs/openai.md").read_text()
    for name in (options(ChatRequest) | options(CompletionRequest)) & {
        *ChatRequest.model_fields, *CompletionRequest.model_fields, *PASSED
    }:  # fmt: skip
        assert f"`{name}`" in manual, name
