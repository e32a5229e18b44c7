"""What the tests of whole engines on a GPU share."""

import fcntl
import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.engine_hand import DEVICE, EngineHand, windows
from kit.engine_storms import storm
from kit.plain import Plain

from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.plugins.gpu.binaries import sources
from hemiola.runtime import manifest
from hemiola.runtime.arch import arch_here
from hemiola.runtime.text import Text

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and DEVICE != "rehearsal", reason="needs a CUDA device"),
]
NO_REHEARSAL = pytest.mark.skipif(not torch.cuda.is_available(), reason="looks at a GPU's own defaults")
DEMO = Path(__file__).resolve().parents[2] / "demo"
FAMILIES = ["nemotron-h-code", "qwen3.5-code"]
SIZES = {"max_len": 512, "max_rows": 8, "max_step_tokens": 256, "page_len": 64, "chunk_len": 16}
PAGE, NUM_DRAFTS = SIZES["page_len"], 3
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
START = "import os\n\n\nclass Stack:\n    "
KINDS = ("mtp", "ngram", "mtp", "scripted", "plain")  # of drafts, in a storm


class Engines:
    """Engines of checkpoints for the device that is here; processes that share a folder build each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._plains: dict[Path, Plain] = {}
        self._stories: dict[str, list[int]] = {}

    def engine(self, checkpoint: Path, **options: Any) -> Path:
        """options: of the build."""
        key = repr((checkpoint.name, sorted(options.items()), arch_here(), sources()))
        engine_dir = self.folder / f"{checkpoint.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(f"{engine_dir}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (engine_dir / manifest.FILE).is_file():
                build(checkpoint, engine_dir, Options(arch=arch_here(), **options))
        return engine_dir

    def demo(self, family: str, **options: Any) -> Path:
        """Of a bundled checkpoint, in SIZES but for these options."""
        return self.engine(DEMO / family, **SIZES | options)

    def plain(self, engine_dir: Path) -> Plain:
        if engine_dir not in self._plains:
            self._plains[engine_dir] = Plain(engine_dir)
        return self._plains[engine_dir]

    def story(self, family: str) -> list[int]:
        """A greedy text, a token at a time; any part of it, as a prompt, is continued by the rest."""
        if family not in self._stories:
            engine_dir = self.demo(family)
            text = Text(engine_dir / "tokenizer").encode(START)
            self._stories[family] = self.plain(engine_dir).greedy(text, 300)
        return self._stories[family]

    def hand(self, family: str, kind: str, built: dict | None = None, **options: object) -> EngineHand:
        if kind == "scripted" and "proposer" not in options:
            text, dice = self.story(family), random.Random(5)
            options["proposer"] = windows(
                lambda ids, num: text[len(ids) : len(ids) + num],
                lambda request: dice.randrange(NUM_DRAFTS + 1),
            )
        engine_dir = self.demo(family, **built or {})
        return EngineHand(engine_dir, self.plain(engine_dir), kind, **options)

    def storms(self, seed: int, num_turns: int) -> Iterator[int]:
        """The seed's engine, opened; then storms of these turns on it, one after the other: steps of each.

        Ten seeds in a row have all drafts of both families, thirty at every depth, five all pools and sizes.
        """
        dice, family = random.Random(seed), FAMILIES[seed % 2]
        max_rows = in_turn(seed, "rows", [1, 3, 8])
        hand = self.hand(
            family,
            KINDS[seed // 2 % len(KINDS)],
            cuda_graphs=True,
            max_rows=max_rows,
            max_len=6 * PAGE,
            max_step_tokens=in_turn(seed, "tokens", [max_rows, PAGE - 1, 3 * PAGE + 1]),
            num_pages=in_turn(seed, "pages", [9, 14, 60]),
            num_snapshots=in_turn(seed, "snapshots", [1, 2, 20]),
            snapshot_interval=in_turn(seed, "interval", [0, PAGE]),
            pipeline_depth=seed % 3,
            shuffle=dice,
        )
        return _storms(hand, dice, self.story(family)[:200], num_turns)


def build_served() -> None:
    """Engines of tests/gpu/test_serving.py, where GPU_ENGINES says: its fixtures have a test's minute."""
    engines = Engines(Path(os.environ["GPU_ENGINES"]))
    for family in FAMILIES:
        engines.demo(family)
    if torch.cuda.device_count() > 1:
        engines.demo("qwen3.5-code", tp=2)


def in_turn(seed: int, name: str, choices: list[int]) -> int:
    """Each choice once in as many seeds, in orders of its own."""
    order = random.Random(f"{name} {seed // len(choices)}").sample(choices, len(choices))
    return order[seed % len(choices)]


def _storms(hand: EngineHand, dice: random.Random, text: list[int], num_turns: int) -> Iterator[int]:
    counters, done = hand.loop.counters, 0
    while True:
        hand.plain.after(text)  # what it has of the text's beginnings is not computed again
        storm(hand, dice, lambda number: text, num_turns, shortest=16)
        hand.plain.keep(text)
        before, done = done, counters.num_steps
        yield done - before


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all workers of a run, or the one that GPU_ENGINES names for several runs."""
    base = tmp_path_factory.getbasetemp()
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    return Path(os.environ.get("GPU_ENGINES", (base.parent if is_worker else base) / "engines"))
