"""The bundled trained checkpoints on real code: conversations with drafts and prefix hits equal the oracle's.

    python -m pytest tests/runtime/test_bundled.py -s      prints acceptance and hit rates

The rule for ties: engines run in fast numerics, in rows of other shapes than the oracle's. Where a token is
not the oracle's best one, the first such place is reported with its margin, and the test fails if that is
more than two bf16 ulp of the logits' scale. Two pipeline depths of one drafter must agree exactly.
"""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import Oracle
from tokenizers import Tokenizer

from hemiola.builder.build import Options, build
from hemiola.runtime.api import Output, SamplingParams
from hemiola.runtime.llm import LLM

DEMO = Path(__file__).parents[2] / "demo"
MODELS = ["nemotron-h-code", "qwen3.5-code"]
TURNS = [(150, 24), (40, 20), (30, 16)]  # tokens of the file that a user adds, tokens of the answer
MODES = {
    (drafts, depth): {"drafts": drafts, "pipeline_depth": depth}
    for drafts in ("mtp", "ngram")
    for depth in (0, 2)
}


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    built: dict[str, Path] = {}

    def get(model: str) -> Path:
        if model not in built:
            built[model] = tmp_path_factory.mktemp("bundled") / model
            build(DEMO / model, built[model], Options(max_len=512, max_rows=4, max_step_tokens=256))
        return built[model]

    return get


def converse(llm: LLM, files: list[list[int]]) -> tuple[list[list[int]], list[list[Output]]]:
    """All conversations turn by turn, side by side: their texts, and the outputs of every turn."""
    texts: list[list[int]] = [[] for _ in files]
    read, turns = 0, []
    for num_added, num_tokens in TURNS:
        texts = [text + file[read : read + num_added] for text, file in zip(texts, files, strict=True)]
        read += num_added
        turns.append(llm.generate(texts, SamplingParams(max_tokens=num_tokens, ignore_eos=True)))
        texts = [text + out.token_ids for text, out in zip(texts, turns[-1], strict=True)]
    return texts, turns


def check_text(oracle: Oracle, text: list[int]) -> str:
    """Every answer's token is the oracle's best one behind the text before it, or ties with it."""
    logits = oracle.logits(text[:-1])
    ulp = 2.0**-8 * float(logits.abs().max())
    end, remark = 0, ""
    for num_added, num_tokens in TURNS:
        start, end = end + num_added, end + num_added + num_tokens
        for at in range(start, end):
            line = logits[at - 1]
            margin = float(line.max() - line[text[at]])
            if margin > 0 and not remark:
                remark = f"; first divergence at {at}, margin {margin:.2g}, an ulp is {ulp:.2g}"
            assert margin <= 2 * ulp, f"token {at}: {text[at]}, not {int(line.argmax())}{remark}"
    return remark


@pytest.mark.parametrize("model", MODELS)
def test_conversations_about_code(bundled: Callable[[str], Path], model: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / model / "tokenizer.json"))
    files = [tokenizer.encode(Path(module.__file__).read_text()).ids for module in (argparse, csv)]
    oracle = Oracle(DEMO / model)
    checked: dict[tuple[int, ...], str] = {}
    texts_of: dict[tuple[str, int], list[list[int]]] = {}
    for mode, options in MODES.items():
        with LLM(bundled(model), adaptive_drafts=False, prefix_cache=True, **options) as llm:
            texts, turns = converse(llm, files)
        texts_of[mode] = texts
        for text in texts:
            if tuple(text) not in checked:
                checked[tuple(text)] = check_text(oracle, text)
        metrics = [out.metrics for turn in turns for out in turn]
        accepted, windows = (
            sum(sum(m.accepted) for m in metrics),
            sum(m.drafted[0] for m in metrics if m.drafted),
        )
        later = [out.metrics for turn in turns[1:] for out in turn]
        hits = sum(m.cached_tokens for m in later) / sum(m.num_prompt_tokens for m in later)
        print(
            f"\n{model}, {mode}: {accepted / windows:.2f} drafts accepted per window of {windows},", end=" "
        )
        print(f"{hits:.0%} of later turns' prompts cached", *(checked[tuple(text)] for text in texts), end="")
        assert accepted > 0 and all(m.cached_tokens > 0 for m in later)
    for drafts in ("mtp", "ngram"):
        assert texts_of[drafts, 0] == texts_of[drafts, 2]
    assert torch.get_num_threads() == 1
