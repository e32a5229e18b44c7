"""Tokens per second against transformers.generate on a bundled checkpoint, tokens compared in the same run.

python benchmarks/generate_cpu.py demo/qwen3.5-code [--numerics exact] [--drafts ngram] [--num-drafts 16]
    [--threads 1] [--repeats 3]

Walls and CPU seconds of the process, the least of the repeats each: on a busy machine only the latter mean
anything, and those best with one thread.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from hemiola import LLM, SamplingParams
from hemiola.builder.build import Options, build

PROMPT_LEN, NEW_LEN = 512, 128


class Timed(NamedTuple):
    """The least wall and CPU seconds of some runs, and the tokens of the last."""

    wall: float
    cpu: float
    token_ids: list[list[int]]


def timed(generate: Callable[[], list[list[int]]], repeats: int) -> Timed:
    walls, cpus, token_ids = [], [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        token_ids = generate()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Timed(min(walls), min(cpus), token_ids)


def prompts(checkpoint: Path, count: int) -> list[list[int]]:
    """Slices of the standard library's sources, PROMPT_LEN tokens each."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    library = Path(argparse.__file__).parent
    names = [
        "argparse.py",
        "ast.py",
        "bdb.py",
        "calendar.py",
        "cmd.py",
        "codecs.py",
        "configparser.py",
        "csv.py",
    ]
    return [tokenizer.encode((library / name).read_text()).ids[:PROMPT_LEN] for name in names[:count]]


def load_transformers(checkpoint: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.time_step_limit = (0.0, float("inf"))  # transformers clamps dt in prefill only
    model.generation_config.eos_token_id = None  # 128 tokens whatever they are
    return model


def run_transformers(model: torch.nn.Module, ids: list[list[int]]) -> list[list[int]]:
    with torch.inference_mode():
        out = model.generate(
            torch.tensor(ids), attention_mask=torch.ones(len(ids), PROMPT_LEN, dtype=torch.long),
            max_new_tokens=NEW_LEN, do_sample=False,
        )  # fmt: skip
    return out[:, PROMPT_LEN:].tolist()


def run_hemiola(llm: LLM, ids: list[list[int]]) -> list[list[int]]:
    outs = llm.generate(ids, SamplingParams(max_tokens=NEW_LEN, temperature=0.0, ignore_eos=True))
    return [list(out.token_ids) for out in outs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--numerics", default="fast", choices=["fast", "exact"])
    parser.add_argument("--drafts", default="none", choices=["none", "ngram", "mtp"])
    parser.add_argument(
        "--num-drafts", type=int, default=None, help="most drafts per step; default: the builder's"
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = load_transformers(args.checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        options = Options(numerics=args.numerics, num_drafts=args.num_drafts)
        build(args.checkpoint, Path(folder) / "engine", options)
        # a cache hit would spare the prompts of every repeat but the first
        with LLM(Path(folder) / "engine", drafts=args.drafts, prefix_cache=False) as llm:
            sizes = f"{PROMPT_LEN} -> {NEW_LEN} tokens, {torch.get_num_threads()} threads"
            print(f"{args.checkpoint.name}, {args.numerics}, drafts {args.drafts}, {sizes}")
            print(
                "requests | transformers tok/s | hemiola tok/s | ratio | CPU s | CPU s | ratio | same tokens"
            )
            for count in (1, 8):
                ids = prompts(args.checkpoint, count)
                theirs = timed(lambda ids=ids: run_transformers(model, ids), args.repeats)
                ours = timed(lambda ids=ids: run_hemiola(llm, ids), args.repeats)
                same = sum(a == b for a, b in zip(ours.token_ids, theirs.token_ids, strict=True))
                total = count * NEW_LEN
                speeds = f"{total / theirs.wall:18.1f} | {total / ours.wall:13.1f}"
                walls = f"{speeds} | {theirs.wall / ours.wall:5.2f}"
                cpus = f"{theirs.cpu:5.2f} | {ours.cpu:5.2f} | {theirs.cpu / ours.cpu:5.2f}"
                print(f"{count:8} | {walls} | {cpus} | {same} of {count}", flush=True)
                if same < count:
                    sys.exit("tokens differ: the speeds above mean nothing")


if __name__ == "__main__":
    main()
