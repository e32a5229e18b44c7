"""Tokens per second against transformers.generate on a bundled checkpoint, tokens compared in the same run.

PYTHONPATH=. python benchmarks/generate_cpu.py demo/qwen3.5-code [--drafts ngram] [--num-drafts 12]
    [--threads 2] [--repeats 3] [--before CHECKOUT]

--before names a checkout of an earlier Hemiola, which takes part in the same run. Everyone has a process of
its own and they work in turn, so that a machine whose speed drifts slows all of them. Walls and CPU seconds
are the least of the repeats: on a busy machine only the latter mean anything, best with one thread.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PROMPT_LEN, NEW_LEN = 512, 128
SOURCES = ("argparse", "ast", "bdb", "calendar", "cmd", "codecs", "configparser", "csv")
Generate = Callable[[list[list[int]]], list[list[int]]]


class Timed(NamedTuple):
    wall: float
    cpu: float
    token_ids: list[list[int]]


class Contestant:
    """A process that generates when it is asked."""

    def __init__(self, name: str, root: Path, args: argparse.Namespace) -> None:
        self.name, self.best = name, {}
        command = [sys.executable, __file__, str(args.checkpoint), "--work", name, "--drafts", args.drafts]
        command += ["--threads", str(args.threads)]
        if args.num_drafts is not None:
            command += ["--num-drafts", str(args.num_drafts)]
        environment = os.environ | {"PYTHONPATH": str(root.resolve())}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)

    def run(self, count: int) -> Timed:
        """With `count` requests; the best of all runs so far is kept."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(count, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"{self.name} died")
        found, known = Timed(*json.loads(answer)), self.best.get(count)
        if known is not None:
            found = Timed(min(found.wall, known.wall), min(found.cpu, known.cpu), found.token_ids)
        self.best[count] = found
        return found


def prompts(checkpoint: Path, count: int) -> list[list[int]]:
    """Slices of the standard library's sources, PROMPT_LEN tokens each."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    library = Path(argparse.__file__).parent
    texts = [(library / f"{name}.py").read_text() for name in SOURCES[:count]]
    return [tokenizer.encode(text).ids[:PROMPT_LEN] for text in texts]


def transformers_generate(checkpoint: Path) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.time_step_limit = (0.0, float("inf"))  # transformers clamps dt in prefill only
    model.generation_config.eos_token_id = None  # 128 tokens whatever they are

    def generate(ids: list[list[int]]) -> list[list[int]]:
        mask = torch.ones(len(ids), PROMPT_LEN, dtype=torch.long)
        with torch.inference_mode():
            out = model.generate(
                torch.tensor(ids), attention_mask=mask, max_new_tokens=NEW_LEN, do_sample=False
            )
        return out[:, PROMPT_LEN:].tolist()

    return generate


def hemiola_generate(args: argparse.Namespace, folder: Path) -> Generate:
    from hemiola import LLM, SamplingParams
    from hemiola.builder.build import Options, build

    build(args.checkpoint, folder, Options(num_drafts=args.num_drafts))
    # a cache hit would spare the prompts of every repeat but the first
    llm = LLM(folder, drafts=args.drafts, prefix_cache=False)
    params = SamplingParams(max_tokens=NEW_LEN, temperature=0.0, ignore_eos=True)

    def generate(ids: list[list[int]]) -> list[list[int]]:
        return [list(out.token_ids) for out in llm.generate(ids, params)]

    return generate


def work(args: argparse.Namespace) -> None:
    """A contestant's process: a count on a line in, seconds and tokens out."""
    import torch

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        if args.work == "transformers":
            generate = transformers_generate(args.checkpoint)
        else:
            generate = hemiola_generate(args, Path(folder) / "engine")
        for line in sys.stdin:
            ids = prompts(args.checkpoint, int(line))
            wall, cpu = time.perf_counter(), time.process_time()
            token_ids = generate(ids)
            seconds = time.perf_counter() - wall, time.process_time() - cpu
            print(json.dumps([*seconds, token_ids]), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--drafts", default="none", choices=["none", "ngram", "mtp"])
    parser.add_argument("--num-drafts", type=int, help="most drafts per step; default: the builder's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier Hemiola")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    root = Path(__file__).parent.parent
    contestants = [Contestant("transformers", root, args), Contestant("hemiola", root, args)]
    if args.before is not None:
        contestants.append(Contestant("before", args.before, args))
    sizes = f"{PROMPT_LEN} -> {NEW_LEN} tokens, {args.threads} threads"
    print(f"{args.checkpoint.name}, drafts {args.drafts}, {sizes}")
    print("requests | who          | tokens/s | against transformers: wall | CPU seconds | same tokens")
    for count in (1, 8):
        for _ in range(1 + args.repeats):  # the first compiles and warms
            for contestant in contestants:
                contestant.run(count)
        first = contestants[0].best[count]
        for contestant in contestants:
            best = contestant.best[count]
            same = sum(a == b for a, b in zip(best.token_ids, first.token_ids, strict=True))
            speed, wall, cpu = count * NEW_LEN / best.wall, first.wall / best.wall, first.cpu / best.cpu
            ratios = f"{wall:26.2f} | {cpu:11.2f} | {same} of {count}"
            print(f"{count:8} | {contestant.name:12} | {speed:8.1f} | {ratios}", flush=True)
            if same < count:
                sys.exit("tokens differ: the speeds above mean nothing")


if __name__ == "__main__":
    main()
