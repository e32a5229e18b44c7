"""What a step's rules cost on a CPU: compiled, and op by op as a GPU captures them, in turns.

    PYTHONPATH=. python benchmarks/rules_cpu.py [--threads 1] [--lines 16] [--vocab 4096 151936]

Each rule is as dear in its field as the server takes. Milliseconds of CPU time for all lines, the least of
the repeats. "op by op" puts the rules of the lines together in each step, and reports logprobs row by row.
In the same run: tokens and logprobs are equal, bit for bit.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from hemiola.plugins.step import forms
from hemiola.runtime.api import MAX_ENTRIES, MAX_WORD_IDS, SamplingParams
from hemiola.runtime.choose.rule import Rule
from hemiola.runtime.choose.rules import RecentGroups
from hemiola.runtime.choose.sampling import choose, logprobs

PROMPT, LENGTH, WIDTH = 100, 400, 4096  # tokens of a prompt and of a text, and room of a slot
NUM_TOP = 20
COMPILED = forms("compiled")
FIELDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "min_p": {"temperature": 1.0, "min_p": 0.01},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_p 0.95": {"temperature": 0.6, "top_p": 0.95},
    "top_k 20, top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top_p 0.999, min_p": {"temperature": 1.5, "top_p": 0.999, "min_p": 1e-9},
    "penalties": {"repetition_penalty": 1.01, "frequency_penalty": 0.01, "presence_penalty": 0.01},
    "logit_bias": {"logit_bias": dict.fromkeys(range(MAX_ENTRIES), -0.01)},
    "bad words": {"words": tuple((n, n + 1, n + 2, n + 3) for n in range(MAX_WORD_IDS // 4))},
    "min_tokens": {"min_tokens": 2**20, "max_tokens": 2**20, "stops": range(MAX_ENTRIES)},
    "logprobs": {"logprobs": NUM_TOP},
}


def rule_of(number: int, *, words: Any = (), stops: Any = (), **values: Any) -> Rule:
    params = SamplingParams(**{"max_tokens": 2**20, **values})
    return Rule(params, number, PROMPT, frozenset(stops), words)


def least(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of CPU time by way, in turns."""
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.process_time()
            way()
            found[name] = min(found[name], 1e3 * (time.process_time() - start))
    return found


def ways_of(field: dict[str, Any], num: int, vocab_size: int) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """The two ways of `num` lines with such a rule."""
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(num, vocab_size, generator=rng) * 3
    ids = torch.randint(vocab_size, (num, WIDTH), generator=rng, dtype=torch.int32)
    slot, position = torch.arange(num), torch.full((num,), LENGTH)
    if "logprobs" in field:
        return {
            "op by op": lambda: by_row(scores, slot),
            "compiled": lambda: [*logprobs(scores, slot, NUM_TOP, COMPILED)],
        }
    rules, recent = [rule_of(n, **field) for n in range(num)], RecentGroups(torch.device("cpu"))
    return {
        "op by op": lambda: [choose(scores, rules, slot, position, ids)],
        "compiled": lambda: [choose(scores, recent(rules), slot, position, ids, COMPILED)],
    }


def by_row(scores: torch.Tensor, token_ids: torch.Tensor) -> list[torch.Tensor]:
    rows = [logprobs(scores[n : n + 1], token_ids[n : n + 1], NUM_TOP) for n in range(len(scores))]
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lines", type=int, default=16)
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 151_936])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| rule | vocabulary | op by op, ms | compiled, ms | factor |")
    print("|---|---|---|---|---|")
    for vocab_size in options.vocab:
        for name, field in FIELDS.items():
            ways = ways_of(field, options.lines, vocab_size)
            old, new = (way() for way in ways.values())
            assert all(map(torch.equal, old, new)), name
            before, now = least(ways, options.repeats).values()
            print(f"| {name} | {vocab_size} | {before:.2f} | {now:.2f} | {before / now:.1f} |", flush=True)


if __name__ == "__main__":
    main()
