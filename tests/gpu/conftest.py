"""Engines of the bundled checkpoints on the GPU that is here, made once per session."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.engine_hand import EngineHand, windows
from kit.gpu_engines import DEMO, NUM_DRAFTS, SIZES, START
from kit.plain import Plain

from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.runtime.text import Text


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(family, options of the build) -> engine directory."""
    built: dict[tuple, Path] = {}

    def get(family: str, **options: Any) -> Path:
        key = (family, *sorted(options.items()))
        if key not in built:
            built[key] = tmp_path_factory.mktemp("engine") / family
            major, minor = torch.cuda.get_device_capability(0)
            build(DEMO / family, built[key], Options(arch=f"sm_{major}{minor}", **SIZES | options))
        return built[key]

    return get


@pytest.fixture(scope="session")
def plain(engine: Callable[..., Path]) -> Callable[..., Plain]:
    known: dict[Path, Plain] = {}

    def get(family: str, **built: Any) -> Plain:
        engine_dir = engine(family, **built)
        return known.setdefault(engine_dir, known.get(engine_dir) or Plain(engine_dir))

    return get


@pytest.fixture(scope="session")
def story(engine: Callable[[str], Path], plain: Callable[[str], Plain]) -> Callable[[str], list[int]]:
    """family -> a greedy text, a token at a time; any part of it, as a prompt, is continued by the rest."""
    known: dict[str, list[int]] = {}

    def get(family: str) -> list[int]:
        if family not in known:
            harness = plain(family).harness
            harness.forget()
            request, text = harness.request(), Text(engine(family) / "tokenizer").encode(START)
            (logits,) = harness.step([(request, text, 0)])
            while len(text) < 300:
                text.append(int(logits[-1].argmax()))
                (logits,) = harness.step([(request, text[-1:], 0)])
            known[family] = text
        return known[family]

    return get


@pytest.fixture
def make_hand(
    engine: Callable[[str], Path], plain: Callable[[str], Plain], story: Callable[[str], list[int]]
) -> Callable[..., EngineHand]:
    def make(family: str, kind: str, built: dict | None = None, **options: object) -> EngineHand:
        built = built or {}
        if kind == "scripted" and "proposer" not in options:
            text, dice = story(family), random.Random(5)
            options["proposer"] = windows(
                lambda ids, num: text[len(ids) : len(ids) + num],
                lambda request: dice.randrange(NUM_DRAFTS + 1),
            )
        return EngineHand(engine(family, **built), plain(family, **built), kind, **options)

    return make
