"""What a step takes on a GPU, counted without one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hemiola.builder.build import build
from hemiola.builder.options import Options
from hemiola.builder.targets.work import Peak
from hemiola.runtime import manifest
from hemiola.runtime.cli import inspected
from hemiola.runtime.config import ServeConfig
from hemiola.runtime.device import memory
from hemiola.runtime.errors import Refused


def test_memory_counts_once_and_until_nobody_holds_it() -> None:
    given = torch.empty(10**6, device="meta")
    with Peak() as peak:
        first = torch.empty(1000, device="meta")
        part = first.view(10, 100)[1]
        given.view(10, -1)
        del first
        assert peak.now == peak.most == 4000
        again = part + 1
        del part
        assert (peak.now, peak.most) == (400, 4400)
        again += 1
    assert (peak.now, peak.most) == (400, 4400)


def test_the_delta_rules_scratch_is_part_of_a_step(tiny_engine: Callable[..., Path]) -> None:
    """It was not known to memory_fraction: a step of 8,192 tokens found no memory behind full pages."""
    num_tokens = 2**16  # of fewer, attention's space for pieces may be the most of a step
    engine_dir = tiny_engine("qwen3_5", arch="sm_90", max_step_tokens=num_tokens, max_rows=8, num_drafts=3)
    found = manifest.load(engine_dir)
    trunk, draft = (found.segment(name).work_bytes for name in ("trunk", "draft"))  # the latter has no delta
    k_records = next(state for state in found.states if state.name.endswith("k_records"))
    heads, depth = k_records.shape[1:]
    query, mixed, keys, solved = 4, 4, 2, 4 + 4  # bytes; totals are few
    scratch = num_tokens * heads * depth * (query + mixed + keys + solved)
    assert scratch < trunk - draft < 2 * scratch
    assert found.work_bytes == max(trunk, draft)
    plan = inspected.memory(engine_dir, found, ServeConfig())
    assert "the largest step" in list(plan.columns[0].cells)
    assert manifest.load(tiny_engine("qwen3_5")).work_bytes == 0


def test_a_step_that_leaves_nothing_for_pages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").write_bytes(b"1234")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 200))
    cuda = torch.device("cuda", 0)
    assert memory.free_bytes(cuda, [tmp_path / "weights"], 6, 50) == 40
    with pytest.raises(Refused, match=r"10 bytes of weights and a step takes up to 90, but of the GPU's 200"):
        memory.free_bytes(cuda, [tmp_path / "weights"], 6, 90)


def test_a_part_of_a_projection_that_starts_askew_is_refused_and_no_traceback(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """No declaration tells where it starts; a launcher refused it as if somebody had called it wrongly."""
    config = json.loads((tiny_checkpoint("nemotron_h_dense") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mamba_head_dim": 7}))
    options = Options(arch="sm_90", max_len=64, max_rows=2, max_step_tokens=32, random_weights=True)
    with pytest.raises(
        Refused, match=r"^conv: x starts at an address that is not .*; use another checkpoint$"
    ):
        build(tmp_path, tmp_path / "engine", options)
    assert not (tmp_path / "engine").exists()
