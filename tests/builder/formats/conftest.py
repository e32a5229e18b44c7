"""A checkpoint of one matrix."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hemiola.builder.checkpoint import Checkpoint


@pytest.fixture
def alone(tmp_path: Path) -> Callable[..., Checkpoint]:
    """X, of these tensors by the ends of their names, and what configs say of it."""

    def make(
        tensors: dict[str, torch.Tensor],
        config: dict[str, Any],
        beside: dict[str, Any] | None = None,
        narrow_inputs: bool = False,
    ) -> Checkpoint:
        content = {"quantization_config": config} if config else {}
        (tmp_path / "config.json").write_text(json.dumps(content))
        if beside is not None:
            (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
        named = {f"X.{end}": tensor.clone().contiguous() for end, tensor in tensors.items()}
        save_file(named, tmp_path / "model.safetensors")
        return Checkpoint(tmp_path, narrow_inputs=narrow_inputs)

    return make
