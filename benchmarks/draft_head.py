"""What a smaller head for drafts costs in accepted drafts, with the same tokens from all.

    PYTHONPATH=. python benchmarks/draft_head.py demo/qwen3.5-code demo/nemotron-h-code

Engines of each checkpoint with the whole head and with --draft-head and --draft-vocab, on one thread; prompts
are the standard library's sources, always all drafts. Kept: tokens that a row keeps of a step, its own
included. Accepted: of drafts at each position of the window, how many stayed. CPU seconds are the least of
the repeats, which take turns. Ends with an error if the tokens of any engine differ.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from generate_cpu import prompts

from hemiola import LLM, SamplingParams
from hemiola.builder.build import Options, build
from hemiola.runtime.progress import size

HEADS: dict[str, dict[str, object]] = {
    "whole": {},
    "fp8": {"draft_head": "fp8"},
    "int4": {"draft_head": "int4"},
    "1024 ids": {"draft_vocab": 1024},
    "1024 ids, int4": {"draft_vocab": 1024, "draft_head": "int4"},
}
LENGTH = 256  # tokens of a prompt


class Head:
    """An engine, and what was measured of it."""

    def __init__(self, checkpoint: Path, folder: Path, num_drafts: int, options: dict[str, object]) -> None:
        sizes = {"max_len": 1024, "max_rows": 8, "num_drafts": num_drafts}
        self.manifest = build(checkpoint, folder, Options(**sizes, **options))
        self.llm = LLM(folder, prefix_cache=False, adaptive_drafts=False)
        self.seconds, self.drafted, self.accepted = float("inf"), [0] * num_drafts, [0] * num_drafts

    def run(self, ids: list[list[int]], params: SamplingParams) -> list[list[int]]:
        start = time.process_time()
        outs = self.llm.generate(ids, params)
        self.seconds = min(self.seconds, time.process_time() - start)
        counts = [(out.metrics.drafted, out.metrics.accepted) for out in outs]
        self.drafted, self.accepted = (
            [sum(own[at] for own in kind if at < len(own)) for at in range(len(self.drafted))]
            for kind in zip(*counts, strict=True)
        )
        return [list(out.token_ids) for out in outs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--num-drafts", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--num-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    params = SamplingParams(max_tokens=args.num_tokens, ignore_eos=True)
    print("| checkpoint | head of drafts | weights | kept | accepted by position | CPU s |")
    print("|---|---|---|---|---|---|")
    for checkpoint in args.checkpoints:
        ids = [prompt[:LENGTH] for prompt in prompts(checkpoint, args.num_prompts)]
        with tempfile.TemporaryDirectory() as folder:
            heads = {
                name: Head(checkpoint, Path(folder) / str(n), args.num_drafts, options)
                for n, (name, options) in enumerate(HEADS.items())
            }
            expected: list[list[int]] | None = None
            for _ in range(args.repeats):
                for name, head in heads.items():
                    found = head.run(ids, params)
                    expected = expected or found
                    if found != expected:
                        sys.exit(f"error: tokens of the head {name!r} differ")
            for n, (name, head) in enumerate(heads.items()):
                stored = size((Path(folder) / str(n) / head.manifest.weights_file).stat().st_size)
                kept = 1 + sum(head.accepted) / max(head.drafted[0], 1)
                pairs = zip(head.accepted, head.drafted, strict=True)
                shares = ", ".join(f"{stayed / max(num, 1):.3f}" for stayed, num in pairs)
                print(
                    f"| {checkpoint.name} | {name} | {stored} | {kept:.3f} | {shares} | {head.seconds:.2f} |"
                )
                head.llm.close()


if __name__ == "__main__":
    main()
