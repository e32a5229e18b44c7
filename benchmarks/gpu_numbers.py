"""How far a GPU's engines are from fp64, beside transformers in bf16 on the same GPU and weights.

    PYTHONPATH=.:tests python3 benchmarks/gpu_numbers.py [--texts 8] [--tokens 300] [CHECKPOINT ...]

The truth is tests/oracle.py in fp64, a process for each text. A line per checkpoint (the bundled ones, if
none is named): errors of all logits of all texts, ||y - truth|| / ||truth||; the largest error of a token's
logits likewise; and how many greedy tokens are the truth's.
"""

import argparse
import multiprocessing
import sys
import tempfile
from itertools import islice
from multiprocessing.pool import AsyncResult
from pathlib import Path

import torch
from kit.checkpoints import reference
from kit.harness import Harness
from oracle import Oracle

from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.runtime.arch import arch_here
from hemiola.runtime.text import Text

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "runtime" / "engine"  # code, which is what the bundled checkpoints know
MOST = 2048  # tokens of an engine


def true_logits(checkpoint: Path, text: list[int]) -> torch.Tensor:
    """In a process of its own."""
    torch.set_num_threads(1)
    return Oracle(checkpoint, torch.float64).logits(text)


def texts_of(checkpoint: Path, num_texts: int, num_tokens: int) -> list[list[int]]:
    """The first tokens of so many files that have enough of them."""
    text = Text(checkpoint)
    files = (text.encode(path.read_text()) for path in sorted(SOURCES.glob("*.py")))
    return list(islice((ids[:num_tokens] for ids in files if len(ids) >= num_tokens), num_texts))


def line(checkpoint: Path, texts: list[list[int]], truths: list[AsyncResult]) -> str:
    """Ours and transformers' against fp64."""
    with tempfile.TemporaryDirectory() as folder:
        engine_dir = Path(folder, "engine")
        build(checkpoint, engine_dir, Options(arch=arch_here(), max_len=MOST, max_step_tokens=MOST))
        harness = Harness(engine_dir)
    ours, theirs = [], []
    model = reference(checkpoint).to(device=harness.device, dtype=torch.bfloat16)
    for text in texts:
        harness.forget()
        ours.append(harness.run(text))
        with torch.inference_mode():
            ids = torch.tensor([text], device=harness.device)
            theirs.append(model(input_ids=ids, use_cache=False).logits[0])
    truth = torch.cat([truth.get() for truth in truths])
    errors = f"{against(torch.cat(ours), truth)} | {against(torch.cat(theirs), truth)}"
    return f"| {checkpoint.name} | {len(texts)} x {len(texts[0])} | {errors} |"


def against(logits: torch.Tensor, truth: torch.Tensor) -> str:
    """Errors, and greedy tokens that are right."""
    wide = logits.double().cpu()[:, : truth.shape[1]]
    by_token = (wide - truth).norm(dim=1) / truth.norm(dim=1)
    whole = ((wide - truth).norm() / truth.norm()).item()
    right = (wide.argmax(1) == truth.argmax(1)).double().mean().item()
    return f"{whole:.2e} | {by_token.max().item():.2e} | {right:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="*")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=300)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_numbers.py: torch finds no CUDA device here")
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    print("| checkpoint | tokens | ours | worst token | right | transformers' bf16 | worst token | right |")
    print("|---|---|---|---|---|---|---|---|")
    checkpoints = asked.checkpoint or [ROOT / "demo/qwen3.5-code", ROOT / "demo/nemotron-h-code"]
    texts = {checkpoint: texts_of(checkpoint, asked.texts, asked.tokens) for checkpoint in checkpoints}
    for found in texts.values():
        if not found or asked.tokens > MOST:
            sys.exit(f"gpu_numbers.py: --tokens {asked.tokens}: engines have {MOST}, {SOURCES} fewer")
    with multiprocessing.get_context("spawn").Pool(sum(map(len, texts.values()))) as pool:
        truths = {
            checkpoint: [pool.apply_async(true_logits, (checkpoint, text)) for text in given]
            for checkpoint, given in texts.items()
        }
        for checkpoint in checkpoints:
            print(line(checkpoint, texts[checkpoint], truths[checkpoint]), flush=True)


if __name__ == "__main__":
    main()
