"""Tiny checkpoints and engines, made once per session; poison for memory that nobody may read."""

import copy
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit import checkpoints

from hemiola.builder.build import Options, build
from hemiola.runtime.device import session as sessions

torch.set_num_threads(1)  # the models are tiny, and threads that wait for a busy core cost minutes
logging.getLogger("torch.__trace").disabled = True  # pytest would make torch.export collect every trace

loaded = functools.cache(sessions.load_program)  # from disk it takes most of a second
sessions.load_program = lambda path: copy.deepcopy(loaded(path))

# Small pages and steps, so that short texts cross their edges.
SMALL = {"max_len": 512, "max_rows": 8, "max_step_tokens": 256, "page_len": 32, "chunk_len": 16}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> checkpoint folder (checkpoints.FAMILIES). Do not change it; copy it first."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = checkpoints.make(family, tmp_path_factory.mktemp("checkpoint") / family)
        return made[family]

    return get


@pytest.fixture(scope="session")
def tiny_engine(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[[str], Path]
) -> Callable[..., Path]:
    """(family, **options of builder.build.Options) -> engine directory. Do not change it; copy it first."""
    built: dict[tuple, Path] = {}

    def get(family: str, **options: object) -> Path:
        key = (family, *sorted(options.items()))
        if key not in built:
            built[key] = tmp_path_factory.mktemp("engine") / family
            build(tiny_checkpoint(family), built[key], Options(**SMALL | options))
        return built[key]

    return get


@pytest.fixture(scope="session")
def poison() -> Callable[..., torch.Tensor]:
    """A tensor full of NaN (of the lowest value, if integers): who reads it before writing it shows."""

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(
            shape, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype
        )

    return make
