"""How far a GPU's engines are from fp64, beside transformers in bf16 on the same GPU and weights.

    PYTHONPATH=.:tests python3 benchmarks/gpu_numbers.py [--tokens 300] [CHECKPOINT ...]

The truth is tests/oracle.py in fp64. A line per checkpoint (the bundled ones, if none is named): errors of
all logits of a text, ||y - truth|| / ||truth||; the largest error of a token's logits likewise; and how many
greedy tokens are the truth's.
"""

import argparse
import sys
import tempfile
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
SOURCE = ROOT / "runtime" / "engine" / "loop.py"  # code, which is what the bundled checkpoints know
MOST = 2048  # tokens of an engine


def line(checkpoint: Path, num_tokens: int) -> str:
    """Ours and transformers' against fp64."""
    with tempfile.TemporaryDirectory() as folder:
        engine_dir = Path(folder, "engine")
        build(checkpoint, engine_dir, Options(arch=arch_here(), max_len=MOST, max_step_tokens=MOST))
        harness = Harness(engine_dir)
        text = Text(engine_dir / "tokenizer").encode(SOURCE.read_text())[:num_tokens]
        ours = harness.run(text)
    truth = Oracle(checkpoint, torch.float64).logits(text)
    model = reference(checkpoint).to(device=harness.device, dtype=torch.bfloat16)
    with torch.inference_mode():
        ids = torch.tensor([text], device=harness.device)
        theirs = model(input_ids=ids, use_cache=False).logits[0]
    return f"| {checkpoint.name} | {len(text)} | {against(ours, truth)} | {against(theirs, truth)} |"


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
    parser.add_argument("--tokens", type=int, default=300)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_numbers.py: torch finds no CUDA device here")
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    print("| checkpoint | tokens | ours | worst token | right | transformers' bf16 | worst token | right |")
    print("|---|---|---|---|---|---|---|---|")
    for checkpoint in asked.checkpoint or [ROOT / "demo/qwen3.5-code", ROOT / "demo/nemotron-h-code"]:
        print(line(checkpoint, asked.tokens), flush=True)


if __name__ == "__main__":
    main()
