"""Draws docs/architecture.png: the rooms of the product, their sizes, and who imports whom.

python scripts/architecture.py        (needs matplotlib: the extra `bench`)
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).resolve().parent.parent
# From top to bottom, what each floor holds; an arrow points from who imports to what is imported.
FLOORS = [
    ["model_repo", "runtime/cli", "builder"],
    ["runtime/serving", "runtime/bench", "runtime/dynamo"],
    ["runtime/llm"],
    ["runtime/step"],
    ["runtime/schedule"],
    ["runtime/cache", "runtime/choose"],
    ["runtime/device"],
    ["runtime"],
    ["plugins/<op>", "plugins/step"],
    ["plugins/cpu", "plugins/gpu"],
    ["plugins"],
]
ABOUT = {
    "model_repo": "the Triton model",
    "runtime/cli": "hemiola, its commands",
    "builder": "checkpoint to engine",
    "runtime/serving": "server, clients, OpenAI",
    "runtime/bench": "hemiola bench",
    "runtime/dynamo": "a worker of NVIDIA Dynamo",
    "runtime/llm": "LLM",
    "runtime/step": "a step: program, executors",
    "runtime/schedule": "what runs next, what came of it",
    "runtime/choose": "sampling, rules, grammars",
    "runtime/cache": "pages, slots, prefixes",
    "runtime/device": "programs, graphs, memory",
    "runtime": "manifest, ABI, options, errors",
    "plugins/<op>": "declaration, reference, forms",
    "plugins/step": "the ops around the trunk",
    "plugins/cpu": "what compiled forms share",
    "plugins/gpu": "what Triton forms share",
    "plugins": "what ops, weights and sizes are",
}
PACKAGES = ("builder", "model_repo", "plugins", "runtime")
COLORS = {"model_repo": "#f3d9b1", "runtime": "#cfe3f5", "builder": "#d9ecd0", "plugins": "#eadcf2"}
WIDTH, HEIGHT = 3.4, 0.95
CONTRACT = ("spec", "rows", "sizes", "groups", "inputs", "ranks", "gpu/dtypes")  # of plugins/


def room(path: Path) -> str:
    """The room of a file. Of what stands in plugins/ itself, all but the contract belongs to the ops."""
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    if name == "runtime/__main__":
        return "runtime/cli"
    if name == "runtime/open":
        return "runtime/llm"
    if name.removeprefix("plugins/") in CONTRACT:
        return "plugins"
    known = max((one for one in ABOUT if name == one or name.startswith(f"{one}/")), key=len)
    return "plugins/<op>" if known == "plugins" else known


def imported(path: Path) -> Iterator[str]:
    """Rooms that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [f"{node.module}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.startswith("hemiola."):
                whole = ROOT.joinpath(*name.split(".")[1:])
                is_module = whole.is_dir() or whole.with_suffix(".py").is_file()
                if is_module or whole.parent != ROOT:
                    yield room(whole if is_module else whole.parent)


def files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def upward() -> list[str]:
    """Files that import from a room above their own."""
    return [
        f"{path.relative_to(ROOT)} ({room(path)}) imports from {other}"
        for path in files()
        for other in sorted(set(imported(path)))
        if floor_of(other) < floor_of(room(path))
    ]


def main() -> None:
    lines: Counter[str] = Counter()
    for path in files():
        lines[room(path)] += len(path.read_text().splitlines())
    arrows = Counter((room(path), other) for path in files() for other in set(imported(path)) - {room(path)})
    drawn = reduced({arrow for arrow in arrows if floor_of(arrow[0]) != floor_of(arrow[1])})
    figure, axes = pyplot.subplots(figsize=(11, 11.5))
    places = {}
    for depth, floor in enumerate(FLOORS):
        for at, name in enumerate(floor):
            places[name] = ((at - (len(floor) - 1) / 2) * (WIDTH + 0.9), -depth * (HEIGHT + 0.75))
    for source, target in sorted(drawn):
        draw_arrow(axes, places[source], places[target], arrows[source, target])
    for name, (x, y) in places.items():
        box = FancyBboxPatch(
            (x - WIDTH / 2, y - HEIGHT / 2), WIDTH, HEIGHT, boxstyle="round,pad=0.05",
            facecolor=COLORS[name.split("/")[0]], edgecolor="#555555", zorder=3,
        )  # fmt: skip
        axes.add_patch(box)
        axes.text(x, y + 0.2, f"{name}/", ha="center", va="center", fontsize=11, weight="bold", zorder=4)
        text = f"{ABOUT[name]}\n{lines[name]:,} lines"
        axes.text(x, y - 0.18, text, ha="center", va="center", fontsize=9, zorder=4)
    axes.set_xlim(-6.6, 6.6)
    axes.set_ylim(-len(FLOORS) * (HEIGHT + 0.75) + 1.0, 0.9)
    axes.axis("off")
    figure.savefig(ROOT / "docs/architecture.png", dpi=110, bbox_inches="tight")


def floor_of(name: str) -> int:
    return next(depth for depth, floor in enumerate(FLOORS) if name in floor)


def reduced(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Without those that others imply: a room may use all that the rooms below it use. Upward ones stay."""

    def reaches(source: str, target: str) -> bool:
        nexts = [b for a, b in arrows if a == source and floor_of(a) < floor_of(b)]
        return target in nexts or any(reaches(one, target) for one in nexts)

    kept = set()
    for source, target in arrows:
        ways = [b for a, b in arrows if a == source and b != target and floor_of(a) < floor_of(b)]
        if floor_of(source) > floor_of(target) or not any(reaches(one, target) for one in ways):
            kept.add((source, target))
    return kept


def draw_arrow(axes: pyplot.Axes, start: tuple[float, float], end: tuple[float, float], count: int) -> None:
    """As wide as there are files that import. Upward arrows would be red (tests/test_layers.py)."""
    down = start[1] >= end[1]
    patch = FancyArrowPatch(
        start, end, arrowstyle="-|>", mutation_scale=12, shrinkA=34, shrinkB=34,
        linewidth=0.5 + min(count, 40) / 12, color="#8a8a8a" if down else "#cc0000",
        connectionstyle="arc3,rad=0.0", alpha=0.75, zorder=1,
    )  # fmt: skip
    axes.add_patch(patch)


if __name__ == "__main__":
    main()
