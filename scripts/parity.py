"""Logits of an engine beside transformers', fp32, on random tokens; needs the dev extra.

PYTHONPATH=.:tests python scripts/parity.py CHECKPOINT ... [--tokens 150]
PYTHONPATH=.:tests python scripts/parity.py --tiny
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import torch
from kit import checkpoints, composed
from kit.harness import Harness

from hemiola.builder.build import Options, build


@torch.no_grad()
def compare(folder: Path, num_tokens: int) -> str:
    """One line: the largest differences in one piece, by token and of the MTP head; calls of the graph."""
    with tempfile.TemporaryDirectory() as temporary:
        options = Options(max_len=max(64, num_tokens), max_rows=3, max_step_tokens=max(12, num_tokens))
        manifest = build(folder, Path(temporary) / "engine", options)
        harness = Harness(Path(temporary) / "engine")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, manifest.vocab_size, (num_tokens,), generator=generator).tolist()
    model = checkpoints.reference(folder)
    expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    whole = (harness.run(tokens) - expected).abs().max()
    pieces = (harness.run(tokens, *[1] * (num_tokens - 1)) - expected).abs().max()
    line = f"{folder.name:22} whole {whole:.1e}  by token {pieces:.1e}"
    if "draft" in harness.programs:
        request = harness.request()
        harness.step([(request, tokens, 0)])
        batch = harness.draft_batch(request, tokens[1:], harness.hidden[:-1], 0)
        logits, _ = harness.call("draft", batch)
        line += f"  mtp {(logits - composed.mtp(folder, model, tokens)[0]).abs().max():.1e}"
    calls = Counter(str(n.target) for n in harness.programs["trunk"].graph.nodes if n.op == "call_function")
    views = calls.pop("<built-in function getitem>", 0)
    return f"{line}  {calls.total()} calls + {views} getitems in {len(manifest.layers)} layers"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, nargs="*")
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--tiny", action="store_true", help="every tiny family of tests/kit/checkpoints.py")
    args = parser.parse_args()
    for folder in args.checkpoint:
        print(compare(folder, args.tokens), flush=True)
    for family in checkpoints.FAMILIES if args.tiny else ():
        with tempfile.TemporaryDirectory() as temporary:
            print(compare(checkpoints.make(family, Path(temporary) / family), args.tokens), flush=True)


if __name__ == "__main__":
    main()
