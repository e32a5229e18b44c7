"""Tokens per second against transformers.generate on a bundled checkpoint, tokens compared in the same run.

python benchmarks/generate_cpu.py demo/qwen3.5-code [--numerics exact] [--repeats 3]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from hemiola import LLM, SamplingParams
from hemiola.builder.build import Options, build

PROMPT_LEN, NEW_LEN = 512, 128


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


def run_transformers(model: torch.nn.Module, ids: list[list[int]]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            torch.tensor(ids), attention_mask=torch.ones(len(ids), PROMPT_LEN, dtype=torch.long),
            max_new_tokens=NEW_LEN, do_sample=False,
        )  # fmt: skip
    return time.perf_counter() - start, out[:, PROMPT_LEN:].tolist()


def run_hemiola(llm: LLM, ids: list[list[int]]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    outs = llm.generate(ids, SamplingParams(max_tokens=NEW_LEN, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - start, [list(out.token_ids) for out in outs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--numerics", default="fast", choices=["fast", "exact"])
    parser.add_argument("--drafts", default="none", choices=["none", "ngram", "mtp"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = load_transformers(args.checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        build(args.checkpoint, Path(folder) / "engine", Options(numerics=args.numerics))
        with LLM(Path(folder) / "engine", drafts=args.drafts) as llm:
            sizes = f"{PROMPT_LEN} -> {NEW_LEN} tokens, {torch.get_num_threads()} threads"
            print(f"{args.checkpoint.name}, {args.numerics}, drafts {args.drafts}, {sizes}")
            print("requests | transformers tok/s | hemiola tok/s | ratio | same tokens")
            for count in (1, 8):
                ids = prompts(args.checkpoint, count)
                theirs = min((run_transformers(model, ids) for _ in range(args.repeats)), key=lambda r: r[0])
                ours = min((run_hemiola(llm, ids) for _ in range(args.repeats)), key=lambda r: r[0])
                total = count * NEW_LEN
                same = sum(a == b for a, b in zip(ours[1], theirs[1], strict=True))
                speeds = f"{total / theirs[0]:18.1f} | {total / ours[0]:13.1f} | {theirs[0] / ours[0]:5.2f}"
                print(f"{count:8} | {speeds} | {same} of {count}")
                if same < count:
                    sys.exit("tokens differ: the speeds above mean nothing")


if __name__ == "__main__":
    main()
