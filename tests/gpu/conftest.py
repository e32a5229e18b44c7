"""Engines of the bundled checkpoints on the GPU that is here, made once per run."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kit.engine_hand import EngineHand
from kit.gpu_engines import Engines, shared_folder


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(shared_folder(tmp_path_factory))


@pytest.fixture(scope="session")
def engine(engines: Engines) -> Callable[..., Path]:
    """(family, options of the build) -> engine directory."""
    return engines.demo


@pytest.fixture(scope="session")
def story(engines: Engines) -> Callable[[str], list[int]]:
    """family -> a greedy text; any part of it, as a prompt, is continued by the rest."""
    return engines.story


@pytest.fixture
def make_hand(engines: Engines) -> Callable[..., EngineHand]:
    """(family, kind of drafts, options of the build, options of serving) -> a hand."""
    return engines.hand
