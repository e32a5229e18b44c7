"""A picture of an engine's graphs: what runs after what, repeated layers once."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hemiola.runtime.manifest import Manifest, Segment

LONGEST = 40  # steps of a layer, or of a few layers that repeat together
WIDTH, HEIGHT = 2.3, 0.42  # inches of a box
COLOURS = {"part": "#cfe2f3", "op": "#fce5cd"}


class Repeat(NamedTuple):
    """Steps that run so many times after each other."""

    steps: tuple[str, ...]
    times: int


def steps_of(segment: Segment) -> list[str]:
    """Parts and ops in their order; parts of the same name are the same."""
    if not segment.pieces:
        return [node.op for node in segment.nodes]
    named = ((piece.kind, piece.name) for piece in segment.pieces if piece.kind != "view")
    return [f"part {name[:6]}" if kind == "part" else name for kind, name in named]


def folded(steps: Sequence[str]) -> list[Repeat]:
    """The steps as blocks, where the block that covers most steps comes first."""
    blocks: list[Repeat] = []
    at = 0
    while at < len(steps):
        best = Repeat((steps[at],), 1)
        for length in range(1, LONGEST + 1):
            block = tuple(steps[at : at + length])
            times = 1
            while tuple(steps[at + times * length : at + (times + 1) * length]) == block:
                times += 1
            if times > 1 and times * length > len(best.steps) * best.times:
                best = Repeat(block, times)
        if best.times == 1 and blocks and blocks[-1].times == 1:
            blocks[-1] = Repeat(blocks[-1].steps + best.steps, 1)
        else:
            blocks.append(best)
        at += len(best.steps) * best.times
    return blocks


def draw(path: Path, found: Manifest) -> None:
    """A column of boxes for each segment; a frame around what repeats."""
    from matplotlib.figure import Figure  # optional, and slow to import
    from matplotlib.patches import FancyBboxPatch, Rectangle

    columns = [(segment, folded(steps_of(segment))) for segment in found.segments]
    tallest = max(sum(len(block.steps) + 0.6 for block in blocks) for _, blocks in columns) + 1
    figure = Figure(figsize=(1 + len(columns) * (WIDTH + 1.2), 0.8 + tallest * HEIGHT), layout="constrained")
    axes = figure.subplots(1, len(columns), squeeze=False)[0]
    figure.suptitle(f"{found.architecture}, {found.target} {found.arch}", fontsize=10)
    for axis, (segment, blocks) in zip(axes, columns, strict=True):
        y = 0.0
        for block in blocks:
            for i, step in enumerate(block.steps):
                colour = COLOURS["part" if step.startswith("part ") else "op"]
                box = FancyBboxPatch(
                    (0.1, y + i + 0.12), 0.7, 0.76, "round,pad=0.02", fc=colour, ec="#666666"
                )
                axis.add_patch(box)
                axis.text(0.45, y + i + 0.5, step, ha="center", va="center", fontsize=8)
            if block.times > 1:
                axis.add_patch(
                    Rectangle((0.03, y), 0.84, len(block.steps), fill=False, ls="--", ec="#999999")
                )
                axis.text(0.9, y + len(block.steps) / 2, f"x {block.times}", va="center", fontsize=9)
            y += len(block.steps) + 0.6
        axis.set(xlim=(0, 1.1), ylim=(tallest, -0.3), title=segment.name)
        axis.axis("off")
    figure.savefig(path, dpi=120)
