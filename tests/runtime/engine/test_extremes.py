"""Every number of SamplingParams at its extremes, on a tiny engine beside an ordinary request."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from kit.refused import refused

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Refused
from hemiola.runtime.llm import LLM

PROMPT = [7, 8, 9] * 6
ORDINARY = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
MOST = 2**31 - 1
DOUBLE = 1.7976931348623157e308
TAKEN: dict[str, list[Any]] = {  # the least and the most that are served, and what rounds oddly
    "max_tokens": [1, MOST],
    "temperature": [5e-324, 1e-320, 1e-38, 1e308, DOUBLE],
    "top_p": [5e-324, 1e-300, 0.9999999999999999],
    "top_k": [1, 320, MOST],
    "min_p": [5e-324, 1],
    "seed": [-(2**63), 2**64 - 1],
    "min_tokens": [1, MOST],
    "repetition_penalty": [5e-324, 1e-320, DOUBLE],
    "presence_penalty": [-2, 2, 5e-324],
    "frequency_penalty": [-2, 2, 5e-324],
    "logit_bias": [{0: DOUBLE}, {0: -DOUBLE, 319: 5e-324}, dict.fromkeys(range(320), -DOUBLE)],
    "logprobs": [0, 20],
    "prompt_logprobs": [0, 20],
    "num_drafts": [0, MOST],
    "priority": [-(2**31), 2**31 - 1],
}
REFUSED: dict[str, list[Any]] = {  # beyond them
    "max_tokens": [0, MOST + 1, 2**63, 10**400],
    "temperature": [-5e-324, 10**400],
    "top_p": [0.0, -5e-324, 1.0000000000000002, 10**400],
    "top_k": [-1, MOST + 1, 2**63 - 1, 2**63, 2**64, 10**400, 10**5000],
    "min_p": [-5e-324, 1.0000000000000002],
    "seed": [-(2**63) - 1, 2**64, 10**400],
    "min_tokens": [-1, MOST + 1, 2**63, 10**400],
    "repetition_penalty": [0, -1.0, 10**400],
    "presence_penalty": [-2.1, 2.1, 10**400],
    "frequency_penalty": [-2.1, 2.1, 10**400],
    "logit_bias": [{320: 1.0}, {-1: 1.0}, {2**63: 1.0}, {10**400: 1.0}, {0: 10**400}, {0: 10**5000}],
    "logprobs": [-1, 21, 2**63],
    "prompt_logprobs": [-1, 21, 2**63],
    "num_drafts": [-1, MOST + 1, 2**63],
    "priority": [-(2**31) - 1, 2**31],
}
IDS: dict[str, list[Any]] = {  # token ids that no engine has
    "stop_token_ids": [[320], [-1], [2**31], [2**63], [10**400], [10**5000]],
    "bad_words_ids": [[[320]], [[1, -1]], [[2**31]], [[2**63]], [[10**400]]],
}


@pytest.fixture(scope="module", params=["none", "ngram"])
def llm(request: pytest.FixtureRequest, tiny_engine: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(tiny_engine("qwen3_5"), max_rows=8, max_len=64, drafts=request.param) as made:
        yield made


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], ORDINARY)[0].token_ids


def params(values: dict[str, Any]) -> SamplingParams:
    given = {"max_tokens": 5, "temperature": 0.7, "seed": 3} | values
    if given.get("min_tokens", 0) > given["max_tokens"]:
        given["max_tokens"] = given["min_tokens"]
    return SamplingParams(**given)


def check_beside(llm: LLM, wanted: list[int], each: list[SamplingParams]) -> None:
    """All of them end, and what runs beside them says what it says alone."""
    company = [params for own in each for params in (own, ORDINARY)]
    outputs = llm.generate([PROMPT] * len(company), company)
    assert {tuple(output.token_ids) for output in outputs[1::2]} == {tuple(wanted)}
    assert all(output.finish_reason in ("stop", "length", "error") for output in outputs)


def test_every_number_is_here() -> None:
    numbers = {
        name
        for name, field in SamplingParams.model_fields.items()
        if {int, float} & set(get_args(field.annotation) or [field.annotation])
    }
    assert numbers - set(IDS) == set(TAKEN) == set(REFUSED)


def test_a_top_k_of_2_to_the_63_does_not_end_the_engine(llm: LLM, wanted: list[int]) -> None:
    with pytest.raises(Refused, match="top_k"):
        check_beside(llm, wanted, [SamplingParams(max_tokens=5, temperature=0.7, top_k=2**63)])
    check_beside(llm, wanted, [SamplingParams(max_tokens=5, temperature=0.7, top_k=MOST)])


def test_min_tokens_of_2_to_the_63_do_not_end_the_engine(llm: LLM, wanted: list[int]) -> None:
    with pytest.raises(Refused, match="_tokens"):
        check_beside(llm, wanted, [SamplingParams(max_tokens=2**63, min_tokens=2**63, stop_token_ids=(3,))])
    check_beside(llm, wanted, [SamplingParams(max_tokens=MOST, min_tokens=MOST, stop_token_ids=(3,))])


@pytest.mark.parametrize("name", TAKEN)
def test_an_extreme_number_costs_its_neighbours_nothing(llm: LLM, wanted: list[int], name: str) -> None:
    for temperature in (0.0, 0.7):
        check_beside(llm, wanted, [params({"temperature": temperature, name: v}) for v in TAKEN[name]])


def test_no_pair_of_extremes_costs_its_neighbours_anything(llm: LLM, wanted: list[int]) -> None:
    ends = [(name, values[place]) for name, values in TAKEN.items() for place in (0, -1)]
    pairs = [dict(pair) for pair in itertools.combinations(ends, 2)]
    legal = [pair for pair in pairs if pair.get("min_tokens", 0) < MOST or "max_tokens" not in pair]
    check_beside(llm, wanted, [params(pair) for pair in legal])


@pytest.mark.parametrize("name", [*REFUSED, *IDS])
def test_a_number_beyond_its_limit_is_refused_before_anything_is_queued(
    llm: LLM, wanted: list[int], name: str
) -> None:
    for value in (REFUSED | IDS)[name]:
        asked = {"max_tokens": 2**31 - 1} | {name: value}
        said = str(refused(lambda asked=asked: llm.generate([PROMPT], SamplingParams(**asked))))
        assert name in said and len(said) < 400, said
    check_beside(llm, wanted, [params({})])
