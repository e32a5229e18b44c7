"""`make soak` in its short form."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.server
def test_after_a_short_soak_everything_is_as_it_was(tiny_engine: Callable[..., Path]) -> None:
    command = [sys.executable, ROOT / "scripts/soak.py", tiny_engine("qwen3_5"), "--requests=150"]
    options = ["--kills=1", "--reloads=1", "--callers=6"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "| wrong or lost | 0 |" in ran.stdout and "| kill | 1 |" in ran.stdout
