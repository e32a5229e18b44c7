"""What grammars cost per step on the host: reading the new tokens, and a mask for each token to be chosen.

    PYTHONPATH=. python benchmarks/grammar.py [--vocab 151936 | --tokenizer tokenizer.json]

Rows follow JSON documents as the tokenizer spells them; that is a checkpoint's, or a byte-level BPE trained
here on Python's own library. CPU time of the process, each step's least of REPEATS, so that a busy machine
disturbs little; goal: 50 us per mask. In the same run: every mask is that of a fresh reader of the whole
text, which knows no slices.
"""

import argparse
import json
import random
import sysconfig
import time
from pathlib import Path

import numpy as np
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.choose.grammar import LIMITS, Grammar, Grammars
from hemiola.runtime.schedule.request import Bounds, Request, new_request

REPEATS = 3
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["function", "class", "module"]},
        "line": {"type": "integer", "minimum": 1},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
        "parent": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "kind", "line", "score", "tags", "parent"],
    "additionalProperties": False,
}
ASKED = {
    "schema": {"json": SCHEMA},
    "any object": {"json_object": True},
    "regex": {"regex": r'(?s)\{"name": "[^"]*".*\}'},
}
WORDS = [
    "import",
    "return",
    "parse",
    "a token",
    "new",
    "line",
    "of text",
    "grammar",
    "naïve",
    "日本",
    "value",
]


def document(dice: random.Random, depth: int = 2) -> dict:
    return {
        "name": " ".join(dice.choices(WORDS, k=dice.randint(1, 6))),
        "kind": dice.choice(["function", "class", "module"]),
        "line": dice.randint(1, 9999),
        "score": round(dice.uniform(-1, 1), 3),
        "tags": ["".join(dice.choices(WORDS, k=2))[:20] for _ in range(dice.randint(0, 3))],
        "parent": document(dice, depth - 1) if depth else None,
    }


def trained(vocab_size: int) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=["<|end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator((path.read_text(encoding="utf-8", errors="ignore") for path in paths), trainer)
    return made


def open_all(grammar: Grammar, texts: list[list[int]], vocab_size: int) -> list[Request]:
    bounds = Bounds(10_000, 10_000, vocab_size, eos_ids=(0,))
    requests = []
    for text in texts:
        request = new_request(1, [1], SamplingParams(max_tokens=9_000), bounds, grammar=grammar)
        request.ids[1 : len(text) + 1] = text
        requests.append(request)
    return requests


def run(grammar: Grammar, texts: list[list[int]], num_drafts: int, vocab_size: int) -> np.ndarray:
    """CPU seconds of each step, in which every row has taken 1 + num_drafts tokens."""
    requests, seconds = open_all(grammar, texts, vocab_size), []
    for done in range(0, min(map(len, texts)) - num_drafts - 1, 1 + num_drafts):
        start = time.process_time()
        for request, text in zip(requests, texts, strict=True):
            assert request.guide is not None
            kept = request.guide.follow(request.ids[: 1 + done], text[done : done + num_drafts])
            assert kept == num_drafts, "a draft of the document was refused"
        seconds.append(time.process_time() - start)
    return np.array(seconds)


def check(grammar: Grammar, text: list[int], vocab_size: int) -> None:
    """Masks of one reader, step by step and ahead, are those of fresh ones without slices."""
    (request,) = open_all(grammar, [text], vocab_size)
    assert request.guide is not None
    plain = LLMatcher(grammar.vocabulary.tokenizer.with_slices([]), grammar.source, limits=LIMITS)
    for done in range(0, len(text) - 4, 4):
        request.guide.follow(request.ids[: 1 + done], text[done : done + 3])
        for ahead, mask in enumerate(request.guide.masks):
            matcher = plain.deep_copy()
            assert matcher.consume_tokens(text[: done + ahead])
            fresh = np.zeros_like(mask)
            matcher.unsafe_compute_mask_ptr(
                fresh.ctypes.data, -(-grammar.vocabulary.tokenizer.vocab_size // 32) * 4
            )
            assert np.array_equal(mask[1:-1], fresh[1:-1])  # the ends differ by end tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--tokenizer", help="a tokenizer.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(options.tokenizer) if options.tokenizer else trained(options.vocab)
    vocab_size = tokenizer.get_vocab_size()
    grammars, dice = Grammars(tokenizer, vocab_size), random.Random(1)
    texts = [tokenizer.encode(json.dumps(document(dice), ensure_ascii=False)).ids for _ in range(64)]
    print(f"{vocab_size} tokens in the vocabulary, {sum(map(len, texts)) / 64:.0f} in a document")
    print("| grammar | compiled in ms | rows | drafts | us per step, mean | p99 | us per mask |")
    print("|---|---|---|---|---|---|---|")
    for name, asked in ASKED.items():
        start = time.process_time()
        params = SamplingParams(structured_outputs=asked).structured_outputs
        assert params is not None
        grammar = grammars.compile(params)
        compiled = 1e3 * (time.process_time() - start)
        check(grammar, texts[0], vocab_size)
        for num_rows in options.rows:
            for num_drafts in (0, 3):
                runs = [run(grammar, texts[:num_rows], num_drafts, vocab_size) for _ in range(REPEATS)]
                steps = 1e6 * np.min(runs, axis=0)
                per_mask = steps.mean() / num_rows / (1 + num_drafts)
                print(
                    f"| {name} | {compiled:.1f} | {num_rows} | {num_drafts} | {steps.mean():.0f}"
                    f" | {np.quantile(steps, 0.99):.0f} | {per_mask:.0f} |"
                )


if __name__ == "__main__":
    main()
