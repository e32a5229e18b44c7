"""Random numbers in a checkpoint's place: engines of real dimensions, to be measured and not to be read.

Large weights are not even stored. The manifest says what they are, and opening draws them on the device.
"""

import math
import zlib
from collections.abc import Iterable

import torch

from hemiola.builder.checkpoint import Checkpoint
from hemiola.builder.lazy import Lazy
from hemiola.runtime.arch import name_of
from hemiola.runtime.manifest_parts import Drawn

LARGE = 2**20  # numbers of a weight that is drawn when an engine is opened


class RandomTensors:
    """Whatever a family asks for: matrices that keep a token's size, the rest as training leaves it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.architecture, self.text = checkpoint.architecture, checkpoint.text_config

    def __contains__(self, name: str) -> bool:
        if name.endswith("in_proj_qkvz.weight"):
            return self.architecture.startswith("Qwen3Next")
        if name.endswith("mlp.gate.weight"):
            return self.text.read("num_experts", int, 0) > 0
        return not name.endswith("_scale")

    def any(self, prefix: str) -> bool:
        if prefix.endswith("experts.gate_up_proj"):
            return True
        heads = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
        return prefix == "mtp." and any(self.text.read(key, int, 0) for key in heads)

    def tensor(self, name: str, *shape: int) -> Lazy:
        std = shape[-1] ** -0.5 if len(shape) > 1 else None

        def make() -> torch.Tensor:
            return _random(name, shape, std, self._middle(name))

        return Lazy.all_at_once(shape, torch.bfloat16, make, std)

    def matrix(self, name: str, *shape: int) -> Lazy:
        return self.tensor(name, *shape)

    def _middle(self, name: str) -> float:
        """Of numbers that are no matrix: scales stand around 1, Qwen's norms around 0, but for one."""
        scales = name.endswith(".D") or "norm" in name
        return float(scales and (self.architecture.startswith("Nemotron") or "linear_attn.norm" in name))

    def leftovers(self) -> Iterable[str]:
        return ()


def drawn(weights: dict[str, Lazy]) -> dict[str, Drawn]:
    """The large ones, by name."""
    return {
        name: Drawn(
            shape=lazy.words.shape if lazy.words else lazy.shape,
            dtype=name_of(lazy.dtype) if lazy.words is None else "bfloat16",
            std=lazy.std,
            layout=str(lazy.words.layout) if lazy.words else "",
            ranked=lazy.ranked,
        )
        for name, lazy in weights.items()
        if lazy.std is not None and math.prod(lazy.shape) >= LARGE
    }


def _random(name: str, shape: tuple[int, ...], std: float | None, middle: float) -> torch.Tensor:
    rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(1, 16, generator=rng).log().bfloat16()
    if name.endswith("dt_bias"):  # steps from 0.001 to 0.1
        steps = torch.empty(shape).uniform_(math.log(1e-3), math.log(0.1), generator=rng).exp()
        return (steps + torch.log(-torch.expm1(-steps))).bfloat16()
    if std is not None:
        return (torch.randn(shape, generator=rng) * std).bfloat16()
    return (middle + 0.1 * torch.randn(shape, generator=rng)).bfloat16()
