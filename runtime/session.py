"""An engine's program with its weights and states: a batch in, logits and hidden out. Sees no request."""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

import hemiola.plugins  # noqa: F401  defines torch.ops.hemiola, which the programs call
from hemiola.runtime.batch import Batch
from hemiola.runtime.cache.storage import Storage
from hemiola.runtime.errors import Refused
from hemiola.runtime.manifest import Manifest, Segment


class Output(NamedTuple):
    logits: torch.Tensor  # [L, V] fp32
    hidden: torch.Tensor  # [T, F] after the final norm


class Session:
    """Runs the trunk. The draft segment is loaded by whoever drafts (issue 3)."""

    def __init__(self, engine_dir: Path, manifest: Manifest, storage: Storage) -> None:
        trunk = manifest.segment("trunk")
        weights = load_weights(engine_dir, manifest, trunk)
        self._program = load_program(engine_dir / trunk.file)
        self._bound = [weights[name] for name in trunk.weights] + [
            storage.tensors[name] for name in trunk.states
        ]
        self._inputs = trunk.inputs

    def run(self, batch: Batch) -> Output:
        with torch.inference_mode():
            logits, hidden = self._program(*self._bound, *(getattr(batch, name) for name in self._inputs))
        return Output(logits, hidden)


def load_program(path: Path) -> torch.nn.Module:
    """The exported graph as a module that takes weights, states and inputs flat."""
    try:
        return torch.export.load(path).graph_module
    except Exception as error:
        raise Refused(
            f"{path} cannot be loaded ({type(error).__name__}: {error}); run build-engine again"
        ) from error


def load_weights(engine_dir: Path, manifest: Manifest, segment: Segment) -> dict[str, torch.Tensor]:
    """The tensors that a segment needs, cast to the dtype in which it runs."""
    dtypes = {weight.name: getattr(torch, weight.dtype) for weight in manifest.weights}
    with safe_open(engine_dir / manifest.weights_file, framework="pt") as file:
        return {name: file.get_tensor(name).to(dtypes[name]) for name in segment.weights}
