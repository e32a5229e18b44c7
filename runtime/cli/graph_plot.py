"""A picture of a model: its layers in order, what flows between them, and where states and pages are."""

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from hemiola.runtime.config import state_bytes
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest import Manifest
from hemiola.runtime.outline import State
from hemiola.runtime.progress import size

LONGEST = 40  # layers of a few that repeat together
MAX_DRAWN = 256  # layers, of which each takes a megabyte in a picture; the largest known models have some 120
KINDS = {
    "mamba2": "Mamba-2",
    "delta": "gated delta rule",
    "attention": "attention",
    "mlp": "MLP",
    "moe": "mixture of experts",
}
COLOURS = {
    "mamba2": "#fce5cd",
    "delta": "#fce5cd",
    "attention": "#cfe2f3",
    "slot": "#fff2cc",
    "page": "#d9ead3",
    "end": "#eeeeee",
}
OTHER = "#ead1dc"
LINE, GREY = "#444444", "#888888"
# In the picture's units, about an inch across and half an inch down.
BOX_LEFT, BOX_WIDTH, BOX_HEIGHT, GAP = 1.3, 2.6, 0.8, 0.9
STATE_LEFT, STATE_WIDTH = 4.35, 2.9
COLUMN = 8.2  # from one segment to the next


class Box(NamedTuple):
    """One thing that tokens go through."""

    title: str
    colour: str
    adds: bool = False  # to what it got, which goes around it
    states: tuple[State, ...] = ()  # of one layer


class DrawnLayer(NamedTuple):
    """One layer; two are equal if they only differ in their number."""

    boxes: tuple[Box, ...]


class Repeat(NamedTuple):
    """Steps that run so many times after each other."""

    steps: tuple[Any, ...]
    times: int


class Placed(NamedTuple):
    """Equal layers that follow each other, once for all repeats of their block."""

    layer: DrawnLayer
    numbers: tuple[int, ...]


class DrawnBlock(NamedTuple):
    """Layers that repeat together."""

    layers: tuple[Placed, ...]
    times: int


def folded(steps: Sequence[Any]) -> list[Repeat]:
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


def layers_of(manifest: Manifest, prefix: str = "layers") -> list[DrawnLayer]:
    """Layers in order; a model's own, or with the prefix mtp.layers those of its MTP head."""
    names = [name for segment in manifest.segments for name in segment.weights]
    numbers = {int(hit[1]) for name in names if (hit := re.match(rf"{prefix}\.(\d+)\.", name))}
    kinds = dict(enumerate(manifest.layers)) if prefix == "layers" else dict.fromkeys(sorted(numbers), "")
    if len(kinds) > MAX_DRAWN:
        message = f"{manifest.architecture} has {len(kinds)} layers, at most {MAX_DRAWN} are drawn"
        raise Refused("too_long", "plot", message=message, way_out="leave --plot out")
    return [_layer(manifest, kind, f"{prefix}.{number}.", names) for number, kind in kinds.items()]


def _layer(manifest: Manifest, kind: str, prefix: str, names: Sequence[str]) -> DrawnLayer:
    layer_names = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    states = tuple(
        state.model_copy(update={"name": state.name.removeprefix(prefix)})
        for state in manifest.states
        if state.name.startswith(prefix)
    )
    if not kind:
        kind = "attention" if any(state.kind == "page" for state in states) else "mlp"
    boxes = [Box(KINDS.get(kind, kind), COLOURS.get(kind, OTHER), adds=True, states=states)]
    behind = [name for name in layer_names if name.startswith("mlp.")]
    if behind and any(name.startswith("mixer.") for name in layer_names):
        experts = any("router" in name or "expert" in name for name in behind)
        boxes.append(Box(KINDS["moe" if experts else "mlp"], OTHER, adds=True))
    return DrawnLayer(tuple(boxes))


def blocks_of(layers: Sequence[DrawnLayer]) -> list[DrawnBlock]:
    """Each layer once, with the numbers of all that are drawn as it; no repeat cuts a layer in two."""
    blocks, at = [], 0
    for block in folded(layers):
        placed: list[Placed] = []
        for i, layer in enumerate(block.steps):
            numbers = tuple(at + i + turn * len(block.steps) for turn in range(block.times))
            if placed and placed[-1].layer == layer:
                numbers, layer = placed[-1].numbers + numbers, placed.pop().layer
            placed.append(Placed(layer, tuple(sorted(numbers))))
        blocks.append(DrawnBlock(tuple(placed), block.times))
        at += len(block.steps) * block.times
    return blocks


def spans(numbers: Sequence[int]) -> str:
    """0-2, 4, 6-8"""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def held_by(states: Sequence[State], page_len: int) -> list[tuple[str, list[str]]]:
    """For each kind of state that a layer owns, the lines of its box."""
    boxes = []
    for kind in ("slot", "page"):
        held = [state for state in states if state.kind == kind]
        if held and kind == "slot":
            boxes.append((kind, [f"slot: {size(state_bytes(held, kind))} a request", *_shapes(held)]))
        elif held:
            each = state_bytes(held, kind) / page_len
            boxes.append((kind, [f"pages: {size(each)} a token", *_shapes(held)]))
    return boxes


def _shapes(states: Sequence[State]) -> list[str]:
    """The records of a recurrence, or keys and values, in one line each."""
    records = [state for state in states if state.name.endswith("_records")]
    others = [state for state in states if state not in records]
    lines = [f"{state.name} {'x'.join(map(str, state.shape))}" for state in others]
    if records:
        lines.append(f"records of {records[0].shape[0]} tokens")
    return lines


def draw(path: Path, manifest: Manifest) -> None:
    """The trunk in a column, drafts in one beside it."""
    from matplotlib.figure import Figure  # optional, and slow to import

    columns = [_Column(manifest, 0.0)]
    columns[0].model()
    if manifest.drafts != "none":
        columns.append(_Column(manifest, COLUMN))
        columns[1].drafts()
    bottom = max(column.y for column in columns) + 0.3
    width = COLUMN * len(columns) + 0.1
    figure = Figure(figsize=(width * 0.95, (bottom + 1.2) * 0.5), layout="constrained")
    axis = figure.subplots()
    for column in columns:
        for paint in column.strokes:
            paint(axis)
    limits = manifest.limits
    slot, page = (state_bytes(manifest.states, kind) for kind in ("slot", "page"))
    axis.set_title(
        f"{manifest.architecture}: {len(manifest.layers)} layers, {manifest.target} {manifest.arch}\n"
        f"states of a request: {size(slot)}, and {size(page / limits.page_len)} for each of its"
        f" {limits.max_len:,} tokens at most (pages of {limits.page_len})",
        fontsize=10,
        loc="left",
    )
    axis.set(xlim=(0, width), ylim=(bottom, -0.4))
    axis.axis("off")
    figure.savefig(path, dpi=120)


class _Column:
    """Boxes from top to bottom. Strokes are painted when the height of the picture is known."""

    def __init__(self, manifest: Manifest, left: float) -> None:
        self._manifest, self._left = manifest, left
        self.y = 0.0
        self.strokes: list[Any] = []

    def model(self) -> None:
        """From token ids to logits."""
        manifest = self._manifest
        self._words("token ids")
        self._box(Box(f"embedding of {manifest.vocab_size:,}", COLOURS["end"]))
        self._layers(layers_of(manifest))
        self._box(Box("norm, linear", COLOURS["end"]), f"{manifest.hidden_size}")
        self._words(f"logits of {manifest.vocab_size:,}")

    def drafts(self) -> None:
        """Who proposes tokens for the next step."""
        manifest, num_drafts = self._manifest, self._manifest.limits.num_drafts
        if manifest.drafts == "mtp":
            ring = tuple(state for state in manifest.states if state.name == "mtp.hidden")
            self._words("the trunk's hidden state, and the next token")
            joined = Box("MTP head: norms, linear", COLOURS["end"], states=ring)
            self._box(joined, f"2 x {manifest.hidden_size}")
            self._layers(layers_of(manifest, "mtp.layers"))
            vocab = manifest.draft_vocab or manifest.vocab_size
            self._box(Box(f"norm, logits of {vocab:,}", COLOURS["end"]), f"{manifest.hidden_size}")
        else:
            self._words("token ids of the request so far")
            self._box(Box("prompt lookup", COLOURS["end"]))
        self._words(
            f"up to {num_drafts} drafts: rows of the trunk's next step,\nwhich accepts or rejects them"
        )

    def _layers(self, layers: Sequence[DrawnLayer]) -> None:
        for block in blocks_of(layers):
            top = self.y
            for placed in block.layers:
                self._layer(placed, block.times)
            if block.times > 1:
                self._frame(top + 0.12, self.y + 0.2, f"x {block.times}")

    def _layer(self, placed: Placed, times: int) -> None:
        top = self.y + GAP
        for box in placed.layer.boxes:
            self._box(box, f"{self._manifest.hidden_size}")
        each = len(placed.numbers) // times
        name = fill(spans(placed.numbers), 12)
        middle, x = (top + self.y) / 2, self._left + 0.45
        self._text(x, middle, f"layer{'s' * (len(placed.numbers) > 1)}\n{name}", color=LINE, fontsize=7)
        if each > 1:
            self._text(x, middle + 0.4 + 0.15 * name.count("\n"), f"x {each}", weight="bold")

    def _words(self, words: str) -> None:
        x, y = self._left + BOX_LEFT + BOX_WIDTH / 2, self.y
        if y:
            self._arrow(x, y, y + GAP - 0.15)
            y += GAP
        lines = words.count("\n") + 1
        self._text(x, y + 0.15 * lines, words)
        self.y = y + 0.32 * lines

    def _box(self, box: Box, flows: str = "") -> None:
        from matplotlib.patches import FancyBboxPatch

        left, top = self._left + BOX_LEFT, self.y + GAP
        middle, bottom = left + BOX_WIDTH / 2, top + BOX_HEIGHT
        self._arrow(middle, self.y, top)
        if flows:
            self._text(middle + 0.08, self.y + 0.62, flows, ha="left", color=GREY, fontsize=7)
        style = "round,pad=0,rounding_size=0.1"
        patch = FancyBboxPatch((left, top), BOX_WIDTH, BOX_HEIGHT, style, fc=box.colour, ec=LINE)
        self.strokes.append(lambda axis: axis.add_patch(patch))
        self._text(middle, top + BOX_HEIGHT / 2, box.title)
        self._states(box, top)
        self.y = bottom
        if box.adds:
            self._around(self.y - BOX_HEIGHT - GAP / 2, bottom + 0.28, middle, left - 0.25)
            self.y = bottom + 0.28

    def _around(self, start: float, end: float, middle: float, left: float) -> None:
        """What a box got, added to what it gives."""
        line = ([middle, left, left, middle - 0.12], [start, start, end, end])
        self.strokes.append(lambda axis: axis.plot(*line, color=GREY, lw=1))
        self.strokes.append(lambda axis: axis.plot([middle] * 2, [end - 0.28, end], color=LINE, lw=1))
        self.strokes.append(
            lambda axis: axis.plot(middle, end, "o", ms=9, mfc="white", mec=LINE, mew=0.8, zorder=3)
        )
        self._text(middle, end, "+", fontsize=8, zorder=4)

    def _states(self, box: Box, top: float) -> None:
        from matplotlib.patches import Rectangle

        left, y = self._left + STATE_LEFT, top
        for kind, lines in held_by(box.states, self._manifest.limits.page_len):
            height = 0.15 + 0.27 * len(lines)
            patch = Rectangle((left, y), STATE_WIDTH, height, fc=COLOURS[kind], ec=GREY, lw=0.8)
            self.strokes.append(lambda axis, patch=patch: axis.add_patch(patch))
            for i, words in enumerate(lines):
                weight = "bold" if i == 0 else "normal"
                self._text(left + 0.1, y + 0.22 + 0.27 * i, words, ha="left", fontsize=7, weight=weight)
            middle = top + BOX_HEIGHT / 2
            ends = (left, middle), (self._left + BOX_LEFT + BOX_WIDTH, middle)
            arrow = {"arrowstyle": "<->", "color": GREY, "lw": 0.8, "shrinkA": 0, "shrinkB": 0}
            self.strokes.append(
                lambda axis, ends=ends, arrow=arrow: axis.annotate(
                    "", xy=ends[0], xytext=ends[1], arrowprops=arrow
                )
            )
            y += height + 0.1

    def _arrow(self, x: float, start: float, end: float) -> None:
        arrow = {"arrowstyle": "-|>", "color": LINE, "lw": 1, "shrinkA": 0, "shrinkB": 0}
        self.strokes.append(
            lambda axis: axis.annotate("", xy=(x, end), xytext=(x, start), arrowprops=arrow, zorder=1)
        )

    def _frame(self, top: float, bottom: float, words: str) -> None:
        from matplotlib.patches import Rectangle

        right = STATE_LEFT + STATE_WIDTH + 0.15
        patch = Rectangle((self._left + 0.02, top), right, bottom - top, fill=False, ls="--", ec=GREY)
        self.strokes.append(lambda axis: axis.add_patch(patch))
        x, y = self._left + right + 0.1, (top + bottom) / 2
        self._text(x, y, words, ha="left", fontsize=11, weight="bold")

    def _text(self, x: float, y: float, words: str, **style: Any) -> None:
        style = {"ha": "center", "va": "center", "fontsize": 9, **style}
        self.strokes.append(lambda axis: axis.text(x, y, words, **style))
