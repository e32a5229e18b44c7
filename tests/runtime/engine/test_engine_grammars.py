"""Grammars in real tiny engines: drafted, cached, preempted, pipelined and in company, as alone and plain."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import regex
import torch
from kit.fake_session import oracle
from kit.guided import EOS, compiled, guided_oracle
from kit.plain import Plain

from hemiola.runtime import config
from hemiola.runtime.api import Output, SamplingParams
from hemiola.runtime.llm import LLM

FAMILIES = ["qwen3_5", "nemotron_h_moe"]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ENDLESS = {"regex": "(ab|c|[0-9]{2})*"}
PARAMS = {
    "regex": {"structured_outputs": {"regex": "[a-d]{6,8}[0-9]{2}"}},
    "endless": {"structured_outputs": ENDLESS},
    "schema": {"structured_outputs": {"json": PERSON}},
    "choice": {"structured_outputs": {"choice": ["é😀 yes", "é no", "日本"]}, "logprobs": 3},
    "drawn": {"structured_outputs": ENDLESS, "temperature": 1.5, "top_p": 0.9, "seed": 7},
    "drawn again": {"structured_outputs": {"json": PERSON}, "temperature": 2.0, "top_k": 50, "seed": 8},
    "penalties": {"structured_outputs": ENDLESS, "repetition_penalty": 1.5, "frequency_penalty": 0.7},
    "bias": {"structured_outputs": ENDLESS, "logit_bias": {37: 4.0}, "min_tokens": 9, "logprobs": 0},
    "words": {"structured_outputs": ENDLESS, "bad_words": ["ab"], "temperature": 0.7, "seed": 9},
    "stop": {"structured_outputs": {"regex": "[a-z ]*"}, "stop": ["ab", "q"], "temperature": 3.0, "seed": 1},
    "free": {"ignore_eos": True},
    "free draws": {"ignore_eos": True, "temperature": 1.0, "seed": 3},
}
PROMPTS = [[40 + n, *[7, 8, 9, 30 + n] * (2 + 5 * n)] for n in range(len(PARAMS))]
GUIDED = [SamplingParams(max_tokens=24, **own) for own in PARAMS.values()]
COMPANY = {
    "plain": {"drafts": "none", "pipeline_depth": 0},
    "ahead": {"drafts": "none", "pipeline_depth": 2, "max_step_tokens": 40},
    "ngram": {"drafts": "ngram", "ngram_min": 1, "pipeline_depth": 0, "max_step_tokens": 24},
    "mtp": {"drafts": "mtp", "pipeline_depth": 1},
    "mtp, steps of fixed sizes": {"drafts": "mtp", "pipeline_depth": 1},
    "ngram, steps of fixed sizes": {"drafts": "ngram", "ngram_min": 1, "pipeline_depth": 2},
    "mtp, few pages": {"drafts": "mtp", "pipeline_depth": 2, "num_pages": 11, "max_len": 256, "max_rows": 8},
}


# Each company once, families in turn; both of them with the drafts that most engines have.
CASES = [(FAMILIES[n % 2], company) for n, company in enumerate(COMPANY)] + [("qwen3_5", "mtp")]


def said(outputs: Sequence[Output]) -> list[tuple]:
    return [(out.token_ids, out.text, out.finish_reason, out.error, out.logprobs) for out in outputs]


@pytest.fixture(scope="module")
def alone(tiny_engine: Callable[..., Path]) -> Callable[[str], list[Output]]:
    known: dict[str, list[Output]] = {}

    def get(family: str) -> list[Output]:
        if family not in known:
            options = {"drafts": "none", "prefix_cache": False, "pipeline_depth": 0, "max_rows": 1}
            with LLM(tiny_engine(family), **options) as llm:
                known[family] = [llm.generate([p], own)[0] for p, own in zip(PROMPTS, GUIDED, strict=True)]
        return known[family]

    return get


@pytest.mark.parametrize(("family", "company"), CASES)
def test_outputs_are_those_of_the_plain_run(
    tiny_engine: Callable[..., Path],
    alone: Callable[[str], list[Output]],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    company: str,
) -> None:
    options = {"max_rows": 4, "adaptive_drafts": False} | COMPANY[company]
    wanted, is_fixed = said(alone(family)), "fixed" in company
    monkeypatch.setattr(config, "_cuda_graphs", lambda *engine: is_fixed)
    with LLM(tiny_engine(family), **options) as llm:
        for _ in range(2):  # the second time with prefix hits
            outputs = llm.generate(PROMPTS, GUIDED)
            assert said(outputs) == wanted
        if is_fixed:
            assert llm._loop.steps.whole.num_steps > llm.counters.num_steps / 2
        if company != "mtp, few pages":
            assert any(out.metrics.cached_tokens for out in outputs)
        if company == "ngram":
            guided = [out.metrics for out, own in zip(outputs, GUIDED, strict=True) if own.structured_outputs]
            assert sum(sum(metrics.accepted) for metrics in guided) > 0, "drafts under a grammar, too"


def test_what_ended_is_what_was_asked_for(alone: Callable[[str], list[Output]]) -> None:
    for family in FAMILIES:
        found = dict(zip(PARAMS, alone(family), strict=True))
        assert re.fullmatch("[a-d]{6,8}[0-9]{2}", found["regex"].text)
        assert found["choice"].text in PARAMS["choice"]["structured_outputs"]["choice"]
        for name, out in found.items():
            assert out.finish_reason in ("stop", "length"), (name, out.error)
            if PARAMS[name].get("structured_outputs") == ENDLESS:
                assert regex.fullmatch(ENDLESS["regex"], out.text, partial=out.finish_reason == "length")
            if PARAMS[name].get("structured_outputs") == {"json": PERSON} and out.finish_reason == "stop":
                person = json.loads(out.text)
                assert list(person) == ["name", "age"] and len(person["name"]) <= 4, out.text
                assert type(person["age"]) is int
        assert "ab" not in found["words"].text
        assert len(found["bias"].token_ids) >= 9
        assert not {"ab", "q"} & set(re.findall("ab|q", found["stop"].text))


def test_greedy_tokens_are_the_best_of_those_that_fit(
    tiny_engine: Callable[..., Path],
    plain_runs: Callable[[Path], Plain],
    alone: Callable[[str], list[Output]],
) -> None:
    """Every token is tried as text, by another library, and the plain run's logits decide."""
    engine_dir = tiny_engine("qwen3_5")
    out = alone("qwen3_5")[list(PARAMS).index("endless")]
    with LLM(engine_dir, max_rows=1) as llm:
        texts = [llm._tokenizer("", "", "").decode([i]) for i in range(llm.manifest.vocab_size)]
        eos_ids = llm.manifest.eos_ids
    ids = [*out.prompt_token_ids, *out.token_ids]
    logits = plain_runs(engine_dir).logits(ids[:-1])
    for place in range(len(out.prompt_token_ids), len(ids)):
        text = "".join(texts[i] for i in ids[len(out.prompt_token_ids) : place])
        may = [
            i for i, t in enumerate(texts) if t and regex.fullmatch(ENDLESS["regex"], text + t, partial=True)
        ]
        may += eos_ids if regex.fullmatch(ENDLESS["regex"], text) else ()
        best = torch.tensor(sorted(may))
        assert ids[place] == best[logits[place - 1][best].argmax()], f"token {place}, behind {text!r}"


def test_log_probabilities_are_the_models_own(alone: Callable[[str], list[Output]]) -> None:
    logprobs = alone("qwen3_5")[list(PARAMS).index("choice")].logprobs
    assert logprobs and any(entry.logprob < entry.top[-1][1] for entry in logprobs), "the best were forbidden"
    assert all(entry.logprob < -0.1 for entry in logprobs), "even where there is one choice only"


def test_a_request_whose_grammar_explodes_ends_alone(tiny_engine: Callable[..., Path]) -> None:
    ambiguous = {"grammar": 'start: s\ns: s s s | s s | "a" |'}
    params = [SamplingParams(max_tokens=200, structured_outputs=ambiguous, min_tokens=199), GUIDED[0]]
    with LLM(tiny_engine("qwen3_5"), max_rows=2, drafts="ngram") as llm:
        bad, good = llm.generate(PROMPTS[:2], params)
        assert bad.finish_reason == "error" and "structured_outputs: " in (bad.error or ""), bad
        assert set(bad.text) == {"a"}, "what it said before is kept"
        assert good.finish_reason == "stop"
        assert said(llm.generate(PROMPTS[1:2], GUIDED[0])) == said([good])


def test_rows_without_a_grammar_do_not_wait_for_one(make_hand: Callable) -> None:
    pattern, num_tokens = "[a-f]{2,}x?", 20
    hand = make_hand(max_rows=2, pipeline_depth=2)
    free = hand.submit([1, 2, 3], max_tokens=num_tokens)
    guided = hand.submit([4, 5, 6], compiled(pattern), max_tokens=num_tokens, stop_token_ids=[EOS])
    steps: dict[int, int] = {}
    for step in range(1000):
        hand.turn()
        steps |= {i: step for i in (free, guided) if hand.ended(i) and i not in steps}
        if len(steps) == 2:
            break
    assert hand.token_ids(free) == oracle([1, 2, 3], num_tokens)
    assert hand.token_ids(guided) == guided_oracle([4, 5, 6], num_tokens, pattern)
    assert steps[free] < num_tokens + 3
