"""A prompt's log-probabilities at the OpenAI port: vLLM's `prompt_logprobs`, and `echo` with `logprobs`."""

from typing import Any

import openai
import pytest
from kit.scripted_triton import ScriptedTriton
from openai import OpenAI

from hemiola.runtime.api import Logprob, Metrics, Piece, PromptLogprobs
from hemiola.runtime.serving.openai.events import num_named
from hemiola.runtime.serving.openai.model import make_decoder

USER: Any = [{"role": "user", "content": "hello"}]
METRICS = Metrics(num_prompt_tokens=3, arrival=0.0)


def scores(ids: list[int]) -> PromptLogprobs:
    """Each token is the second best."""
    return [None, *(Logprob(token, -2.0, ((token + 1, -1.0), (token, -2.0))) for token in ids[1:])]


def script(ids: list[int]) -> list[Piece]:
    found = [Logprob(7, -0.5, ((7, -0.5),))]
    first = Piece("a", [7], found, prompt_logprobs=scores(ids))
    return [first, Piece("b", [7], found, "stop", METRICS)]


def test_a_completion_has_them_in_each_choice_and_the_engine_computes_them_once(
    client: OpenAI, triton: ScriptedTriton, models: dict
) -> None:
    prompts = [models["tiny"].text.encode(prompt) for prompt in ("def f", "def g")]
    triton.script = script(prompts[0])
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, extra_body={"prompt_logprobs": 1})
    asked = [triton.inputs(i).get("prompt_logprobs") for i in range(4)]
    assert sorted(asked, key=str) == [1, 1, None, None], "once for each prompt"
    for choice in answer.choices:
        first, second, *_ = choice.model_dump()["prompt_logprobs"]
        own = prompts[0][1]
        names = {id: models["tiny"].tokens.name(id) for id in (own, own + 1)}
        assert first is None
        assert second == {
            str(own): {"logprob": -2.0, "rank": None, "decoded_token": names[own]},
            str(own + 1): {"logprob": -1.0, "rank": 1, "decoded_token": names[own + 1]},
        }


def test_a_chat_has_them_beside_its_choices(client: OpenAI, triton: ScriptedTriton) -> None:
    triton.script = script([5, 6, 9])
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(
        model="tiny", messages=USER, n=2, extra_body={"prompt_logprobs": 2} | off
    )
    first, *others = answer.model_dump()["prompt_logprobs"]
    assert first is None and [list(entry) for entry in others] == [["6", "7"], ["9", "10"]]
    assert [entry["rank"] for entry in others[0].values()] == [2, 1]
    assert "prompt_logprobs" not in answer.choices[0].model_dump()
    plain = client.chat.completions.create(model="tiny", messages=USER, extra_body=off)
    assert "prompt_logprobs" not in plain.model_dump()


def test_an_engine_without_a_tokenizer_names_no_tokens(client: OpenAI, triton: ScriptedTriton) -> None:
    triton.script = script([5, 6])
    answer = client.completions.create(model="ids", prompt=[5, 6], extra_body={"prompt_logprobs": 0})
    assert answer.choices[0].model_dump()["prompt_logprobs"] == [
        None,
        {"6": {"logprob": -2.0, "rank": None, "decoded_token": None}},
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_logprobs_begins_with_the_prompts(
    client: OpenAI, triton: ScriptedTriton, models: dict, stream: bool
) -> None:
    """As evaluation harnesses read it: the first token has none, and offsets are those of one text."""
    tokens, ids = models["tiny"].tokens, models["tiny"].text.encode("x = é€")
    triton.script = script(ids)
    made = client.completions.create(model="tiny", prompt="x = é€", logprobs=1, echo=True, stream=stream)
    choices: list[Any] = [chunk.choices[0] for chunk in made] if stream else [made.choices[0]]  # type: ignore[union-attr]
    found = [choice.logprobs for choice in choices if choice.logprobs]
    assert "".join(choice.text for choice in choices) == "x = é€ab"
    assert [t for one in found for t in one.tokens] == [tokens.name(i) for i in [*ids, 7, 7]]
    values = [value for one in found for value in one.token_logprobs]
    assert values == [None, *[-2.0] * (len(ids) - 1), -0.5, -0.5]
    top = [entry for one in found for entry in one.top_logprobs]
    assert top[0] is None and top[1] == {tokens.name(ids[1] + 1): -1.0}, "so many as were asked for"
    offsets = [offset for one in found for offset in one.text_offset]
    assert offsets[: len(ids) + 1] == tokens.offsets(ids, 0, make_decoder()) and offsets == sorted(offsets)
    assert triton.inputs()["prompt_logprobs"] == 1


def test_several_echoes_of_a_prompt_have_the_same_scores(client: OpenAI, triton: ScriptedTriton) -> None:
    triton.script = script([5, 6, 9])
    answer = client.completions.create(model="tiny", prompt=[5, 6, 9], logprobs=0, echo=True, n=2)
    assert [choice.logprobs.token_logprobs for choice in answer.choices if choice.logprobs] == [
        [None, -2.0, -2.0, -0.5, -0.5]
    ] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs are no part of a stream's chunks"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"prompt_logprobs": True}, "prompt_logprobs is True"),
        ({"stream": True, "echo": True, "logprobs": 1, "n": 2}, "n is 2 in a stream that echoes logprobs"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused(client: OpenAI, options: dict, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(model="tiny", prompt="x", extra_body=options)
    if "echo" not in options:
        with pytest.raises(openai.BadRequestError, match=said):
            client.chat.completions.create(model="tiny", messages=USER, extra_body=options)


def test_responses_do_not_take_them(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="unknown option 'prompt_logprobs'"):
        client.responses.create(model="tiny", input="x", extra_body={"prompt_logprobs": 1})


def test_scores_of_a_prompt_are_written_by_the_event_loop() -> None:
    """A thread does it from so many tokens on as the events name, the best of each place among them."""
    assert num_named(script([5, 6, 9])[0]) == 1 + 2 * (1 + 2)
