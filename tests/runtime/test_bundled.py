"""The bundled trained checkpoints on real code: conversations with drafts and prefix hits equal the oracle's.

    python -m pytest tests/runtime/test_bundled.py -s      prints acceptance and hit rates

Whatever drafts and however deep the pipeline, the texts are the same; and every token is the best one of
the oracle, which sums in another order: to within MARGIN.
"""

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import Oracle
from tokenizers import Tokenizer

from hemiola.runtime.api import Output, SamplingParams
from hemiola.runtime.llm import LLM

DEMO = Path(__file__).parents[2] / "demo"
MODELS = ["nemotron-h-code", "qwen3.5-code"]
TURNS = [(150, 24), (40, 20), (30, 16)]  # tokens of the file that a user adds, tokens of the answer
MODES = [("none", 0), ("mtp", 0), ("mtp", 2), ("ngram", 0), ("ngram", 2)]  # drafts, pipeline_depth
MARGIN = 1e-4  # of logits


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


def check_text(oracle: Oracle, text: list[int]) -> None:
    """Every answer's token is the oracle's best one behind the text before it."""
    logits, end = oracle.logits(text[:-1]), 0
    for num_added, num_tokens in TURNS:
        start, end = end + num_added, end + num_added + num_tokens
        for at in range(start, end):
            line = logits[at - 1]
            assert line[text[at]] >= line.max() - MARGIN, f"token {at}: {text[at]}, not {int(line.argmax())}"


@pytest.mark.parametrize("model", MODELS)
def test_conversations_about_code(bundled: Callable[[str], Path], model: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / model / "tokenizer.json"))
    files = [tokenizer.encode(Path(module.__file__).read_text()).ids for module in (argparse, csv)]
    expected: list[list[int]] = []
    for drafts, depth in MODES:
        options = {"drafts": drafts, "pipeline_depth": depth, "adaptive_drafts": False, "prefix_cache": True}
        with LLM(bundled(model), **options) as llm:
            texts, turns = converse(llm, files)
        expected = expected or texts
        assert texts == expected, (drafts, depth)
        metrics = [out.metrics for turn in turns for out in turn]
        accepted = sum(sum(m.accepted) for m in metrics)
        windows = sum(m.drafted[0] for m in metrics if m.drafted)
        later = [out.metrics for turn in turns[1:] for out in turn]
        hits = sum(m.cached_tokens for m in later) / sum(m.num_prompt_tokens for m in later)
        print(
            f"\n{model}, {drafts} {depth}: {accepted} drafts accepted in {windows} windows, {hits:.0%} cached"
        )
        assert (accepted > 0) == (drafts != "none") and all(m.cached_tokens > 0 for m in later)
    oracle = Oracle(DEMO / model)
    for text in expected:
        check_text(oracle, text)
    assert torch.get_num_threads() == 1
